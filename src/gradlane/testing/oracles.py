"""What the papers' own algorithms and formulas say, written down as printed, to hold the simulators
against.
"""

from __future__ import annotations

import math


def mercury_algorithm_1(tau_bp: list[int], t_bp: list[int], t_push: list[int]) -> list[int]:
    """Mercury Algorithm 1, line by line: tau_push. Layers count from 1, index 0 is unused."""
    L = len(tau_bp) - 1
    tau_push = [0] * (L + 1)
    buf: set[int] = set()
    t_hat = [0] * (L + 1)
    for layer in range(1, L + 1):
        t_hat[layer] = t_push[layer]

    def consume(tau_now: int, delta: float) -> None:
        while delta > 0 and buf:
            layer = min(buf)
            if delta >= t_hat[layer]:
                delta -= t_hat[layer]
                tau_now += t_hat[layer]
                t_hat[layer] = 0
                buf.remove(layer)
                tau_push[layer] = tau_now
            else:
                t_hat[layer] -= int(delta)
                delta = 0

    for layer in range(L, 0, -1):
        tau_now = tau_bp[layer]
        buf.add(layer)
        if layer == 1:
            consume(tau_now, math.inf)
        else:
            consume(tau_now, t_bp[layer - 1])
    return tau_push


def mercury_iteration(tau_pull: list[int], t_upd: list[int], t_fp: list[int]) -> int:
    """Mercury Eq. 4 and 5; layers count from 1."""
    tau_fp = tau_pull[1] + t_upd[1] + t_fp[1]
    for layer in range(2, len(tau_pull)):
        tau_fp = max(tau_pull[layer], tau_fp) + t_upd[layer] + t_fp[layer]
    return tau_fp


def mercury_optimum(layers: list[tuple[int, int, int, int]]) -> int:
    """An iteration of `generators.chain(*layers)` on a network without startup where a byte takes a
    nanosecond: Algorithm 1, then Eq. 4 and 5. By Theorem 1 no schedule is faster.
    """
    t_bp, t_push, t_upd, t_fp = ([0, *column] for column in zip(*layers, strict=True))
    tau_bp = [0] * (len(layers) + 1)
    for layer in range(len(layers), 0, -1):
        tau_bp[layer] = t_bp[layer] + (tau_bp[layer + 1] if layer < len(layers) else 0)
    return mercury_iteration(mercury_algorithm_1(tau_bp, t_bp, t_push), t_upd, t_fp)
