"""Wire dtype: the element type in which float32 gradients travel, where that is not float32."""

from __future__ import annotations

from gradlane.core.fields import need

WIRE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16"}
"""The names that options take, with the dtype that each stands for."""


def wire_dtype_of(given: object) -> str:
    """The dtype that `given` names.

    Args:
        given: one of `WIRE_DTYPES`, or the torch.dtype.

    Returns:
        "bfloat16" or "float16".

    Raises:
        InputError: it is neither.
    """
    name = str(given).removeprefix("torch.")
    need(name in WIRE_DTYPES, "wire_dtype", given, "torch.bfloat16 or torch.float16, or their names (bf16, fp16)")
    return WIRE_DTYPES[name]
