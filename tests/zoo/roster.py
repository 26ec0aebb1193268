"""All architectures that are built, and the examination of one of them."""

from __future__ import annotations

from zoo import causal, conditional
from zoo.examine import Finding, examine, prompts

GROUPS: dict[str, list[str]] = {
    "causal": [name for name in causal.CAUSAL_TYPES if name not in causal.NOT_BUILT],
    "conditional": [name for name in conditional.CONDITIONAL_TYPES if name not in conditional.NOT_BUILT],
}
SIZES = {"single": 1, "batch": 2}


def examined(group: str, name: str) -> dict[str, Finding]:
    """Return the finding for one prompt, and for a batch where plain decoding can do that."""
    sizes = [size for size in SIZES if size == "single" or not fails_in_a_batch(group, name)]
    return {size: examined_at(group, name, SIZES[size]) for size in sizes}


def examined_at(group: str, name: str, batch: int) -> Finding:
    """Return the finding for one batch size."""
    if group == "causal":
        return examine(causal.build_causal(name), prompts(batch))
    example = conditional.build_conditional(name, batch=batch)
    return examine(example.model, example.inputs)


def fails_in_a_batch(group: str, name: str) -> bool:
    """Return whether plain decoding fails for two rows."""
    return name in (causal.PADDING_FAILS if group == "causal" else conditional.BATCH_FAILS)
