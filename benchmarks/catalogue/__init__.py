"""Every causal-LM class of the transformers library, eager against seqsplit, in float64."""
