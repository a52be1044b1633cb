"""Memory, FLOPs and time of one training step by several methods, each in a process of its own.

``python -m benchmarks.suite`` measures and writes ``docs/performance.md`` with its plots.
``cases.py`` says what is measured, ``worker.py`` and ``streambp.py`` are the processes that do it
(each runs ``serve.py``), ``process.py`` is their other end, ``run.py`` asks them, ``figures.py``
draws numbers from the answers, ``report.py`` and ``plots.py`` write them down.
"""
