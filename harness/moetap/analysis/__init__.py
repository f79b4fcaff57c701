"""Pure mathematics on traces: one module per metric, one result dataclass per metric.

Knows `moetap.trace` and `moetap.errors`. Refuses to know files, models and how a result is shown:
it runs on a machine with no MLX, and `moetap.report` renders what it returns.
"""
