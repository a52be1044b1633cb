"""From Dynamo's graph to one functional ATen graph."""
