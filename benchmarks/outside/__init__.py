"""Decoders of packages outside transformers, eager against seqsplit, in float64."""
