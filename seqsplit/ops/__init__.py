"""What chunk bodies call beside ATen: reads of caches, attention, stencils, scans, weights."""
