"""A wrapper around `forward` that hides its signature changes nothing."""

from __future__ import annotations

import torch
from integration.comparing import prompts

import hf_specdec


def hide_signature(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def test_a_target_whose_forward_is_wrapped_gives_the_plain_text(target, drafts):
    hf_specdec.enable(target)
    inputs = prompts([3, 6, 11])
    wanted = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    hide_signature(target)
    output = target.generate(**inputs, max_new_tokens=20, do_sample=False, draft_model=drafts["noisy"])
    assert torch.equal(output, wanted)


def test_a_draft_whose_forward_is_wrapped_still_drafts(target, drafts):
    hf_specdec.enable(target)
    inputs = prompts([3, 6, 11])
    hide_signature(drafts["identical"])
    output = target.generate(
        **inputs, max_new_tokens=20, do_sample=False, draft_model=drafts["identical"], return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, target.generate(**inputs, max_new_tokens=20, do_sample=False))
    assert output.speculation.acceptance_rate == 1.0
    assert output.speculation.fallbacks == []
