"""Estimators of `tr f(A)`, one per file; the front doors are in `pnkrylov.trace`.

`quadrature` (forms of small tridiagonals) -> `probes` (nested random probes) -> `multilevel` (their
means, errors and bias) -> `resolved` (what one Lanczos run knows) -> `adaptive` (the default
estimator: spends a budget, grows) and `peers` (the estimators it is compared with).
"""
