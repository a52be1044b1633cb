"""Measurements of seqsplit: memory, FLOPs, compile time and step time against known baselines.

Each script runs from the repository root as ``python -m benchmarks.NAME`` and explains its options
with ``--help``. See ``docs/measuring.md`` for what is measured and how.
"""
