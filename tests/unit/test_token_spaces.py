"""Tokenizers compared by what their tokens produce, and text carried over between them."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import pytest
import tokenizers_of_text as trained
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from hf_specdec.drafters.translation import Translator, chosen_space
from hf_specdec.engine.sequences import Sequences
from hf_specdec.errors import IncompatibleDraftError
from hf_specdec.pairing import tokenizers as found
from hf_specdec.pairing.compat import TokenSpaces, compare
from hf_specdec.pairing.spelling import complete_part, token_space_of
from hf_specdec.pairing.tokenizers import Source, pairing_of

KINDS = {
    "byte level": trained.byte_level,
    "metaspace": trained.metaspace,
    "metaspace without bytes": lambda: trained.metaspace(has_bytes=False),
    "unigram": trained.unigram,
    "single bytes": models.build_byte_tokenizer,
}
WHOLE = ("byte level", "metaspace", "single bytes")


def spaces_of(target: str, draft: str, **arguments: Any) -> TokenSpaces:
    return compare(KINDS[target](), KINDS[draft](), **arguments)


# --- what tokens produce ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WHOLE)
@given(text=st.text(max_size=30))
@settings(max_examples=40, deadline=None)
def test_the_pieces_of_a_text_are_the_text(kind: str, text: str) -> None:
    text = text.replace("\ud800", "")
    space = token_space_of(KINDS[kind]())
    if any(content in text for content in space.specials.values()):
        return
    pieces = [space.piece(token) for token in space.encode(text)]
    assert None not in pieces
    said = b"".join(piece or b"" for piece in pieces)
    assert said == ((b" " if space.adds_space and text else b"") + text.encode())


@pytest.mark.parametrize("kind", WHOLE)
@given(before=st.text(max_size=12), text=st.text(min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_text_can_be_added_to_any_text(kind: str, before: str, text: str) -> None:
    space = token_space_of(KINDS[kind]())
    ids = space.encode(before) if before else []
    for may_drop in (False, True):
        num_dropped, new = space.spell_after(ids, text, may_drop=may_drop)
        assert num_dropped <= may_drop
        dropped = b"".join(space.piece(token) or b"" for token in ids[len(ids) - num_dropped :])
        assert b"".join(space.piece(token) or b"" for token in new) == dropped + text.encode()


def test_a_seam_inside_of_a_word_can_be_closed() -> None:
    space = token_space_of(trained.byte_level())
    whole = space.encode(" keeper")
    assert len(whole) == 1
    start = space.encode(" kee")
    assert space.spell_after([7, *start], "per", may_drop=len(start) == 1)[1] in ([*whole], space.encode("per"))


def test_a_character_that_is_not_complete() -> None:
    whole = "é🙂".encode()
    for end in range(len(whole) + 1):
        part, rest = complete_part(whole[:end])
        assert part + rest == whole[:end]
        part.decode()
    assert complete_part(b"\xff") == (b"\xff", b"")


# --- comparing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), list(product(KINDS, KINDS)))
def test_maps_lead_to_the_same_piece(target: str, draft: str) -> None:
    spaces = spaces_of(target, draft)
    assert spaces.num_shared == len(spaces.target.ids.keys() & spaces.draft.ids.keys()) > 20
    for one, other, ids in (
        (spaces.target, spaces.draft, spaces.target_to_draft),
        (spaces.draft, spaces.target, spaces.draft_to_target),
    ):
        for token, mapped in enumerate(ids.tolist()):
            if mapped >= 0 and one.piece(token) is not None:
                assert other.piece(mapped) == one.piece(token)
            assert mapped >= 0 or one.piece(token) not in other.ids
    # No token of the draft's stands for two that may be proposed.
    sources = spaces.target_to_draft[spaces.proposable].tolist()
    assert len(sources) == len(set(sources)) >= spaces.num_shared


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokenizer(kind: str) -> None:
    assert spaces_of(kind, kind).kind == "same"


def test_a_padded_vocabulary_and_added_tokens_make_no_other_tokenizer() -> None:
    plain, padded = trained.byte_level(), trained.byte_level.__wrapped__()
    padded.add_special_tokens({"additional_special_tokens": ["<|tool|>", "<|turn|>"]})
    spaces = compare(plain, padded, target_size=512, draft_size=432)
    assert spaces.kind == "same"
    assert len(spaces.target_to_draft) == 512
    assert len(spaces.draft_to_target) == 432


def test_other_ids_are_another_token_space() -> None:
    tokenizer = trained.byte_level()
    twin, _ = trained.permuted(tokenizer, trained.build_for(tokenizer))
    spaces = compare(tokenizer, twin)
    assert spaces.kind == "shared"
    assert spaces.num_shared == spaces.target.num_pieces
    assert (spaces.target_to_draft >= 0).all()
    content = tokenizer.convert_tokens_to_ids("<|turn|>")
    assert spaces.target_to_draft[content] == twin.convert_tokens_to_ids("<|turn|>")


def test_ends_of_texts_belong_together() -> None:
    spaces = compare(trained.byte_level(), trained.metaspace(), target_eos_ids=(2, 0))
    end, draft_end = 0, spaces.draft.roles["eos"]
    assert spaces.draft_to_target[draft_end] == end
    assert spaces.target_to_draft[[0, 2]].tolist() == [draft_end, draft_end]
    assert spaces.proposable[[0, 2]].tolist() == [True, False]


def test_ids_beyond_the_models_vocabulary_do_not_count() -> None:
    spaces = compare(trained.byte_level(), trained.metaspace(), target_size=300, draft_size=310)
    assert len(spaces.target_to_draft) == 300
    assert spaces.target_to_draft.max() < 310
    assert max(spaces.draft.encode("The keeper wrote in the evening")) < 310


def test_too_little_in_common() -> None:
    cyrillic = trained.byte_level()
    spaces = compare(cyrillic, _letters("жщъ"))
    assert not spaces.can_share
    assert not spaces.can_tell
    for way in ("auto", "shared", "text"):
        with pytest.raises(IncompatibleDraftError, match=r"397 and the draft's 3 tokens 0 are the same"):
            spaces.refuse_strangers(way)
    compare(cyrillic, trained.metaspace()).refuse_strangers("auto")
    compare(cyrillic, trained.metaspace()).refuse_strangers("text")


def test_a_draft_that_can_share_but_not_tell() -> None:
    spaces = compare(trained.byte_level(), _letters("abcdefgh"))
    assert spaces.can_share
    assert not spaces.can_tell
    spaces.refuse_strangers("auto")
    with pytest.raises(IncompatibleDraftError, match="Pass `token_space='shared'`"):
        spaces.refuse_strangers("text")
    ids = torch.tensor([[5, 6, 7]])
    assert chosen_space(spaces, "auto", ids, None, do_sample=False) == "shared"


def _letters(letters: str) -> Any:
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(kinds.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# --- carrying over ----------------------------------------------------------------------------------------------


def said(spaces: TokenSpaces, ids: list[int]) -> bytes:
    return b"".join(spaces.draft.piece(token) or b"" for token in ids)


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in WHOLE for b in WHOLE if a != b])
@given(prompt=st.text(min_size=1, max_size=15), text=st.text(max_size=25), cuts=st.lists(st.integers(1, 4)))
@settings(max_examples=25, deadline=None)
def test_a_text_arrives_whole_however_it_is_cut(
    target: str, draft: str, prompt: str, text: str, cuts: list[int]
) -> None:
    spaces = spaces_of(target, draft)
    whole = spaces.target.encode(prompt + text)
    num_prompt = min(len(spaces.target.encode(prompt)), len(whole))
    wanted = b"".join(spaces.target.piece(token) or b"" for token in whole)
    wanted = wanted.removeprefix(b" ") if spaces.target.adds_space else wanted
    for way in ("one by one", "text"):
        translator = Translator(spaces)
        own = translator.begin(0, whole[:num_prompt])
        start = num_prompt
        for cut in [*cuts, len(whole)]:
            tokens = whole[start : start + cut]
            if way == "text":
                translator.reread(own, tokens, [])
            else:
                translator.read(own, tokens)
            start += cut
        got = said(spaces, own.ids)
        assert got.removeprefix(b" ") == (wanted.removeprefix(b" ") if spaces.draft.adds_space else wanted) or (
            got == wanted
        )
        assert not own.unread
        assert len(own.ends) == len(own.ids)
        assert own.ends == sorted(own.ends)
        assert own.end == (own.target_ends[-1] if own.target_ends else 0)


def test_a_draft_without_bytes_waits_for_the_rest_of_a_character() -> None:
    spaces = spaces_of("byte level", "metaspace without bytes")
    translator = Translator(spaces)
    own = translator.begin(0, spaces.target.encode("The keeper"))
    before = len(own.ids)
    letter = spaces.target.spell_bytes("ф".encode()) or spaces.target.encode("ф")
    smile = spaces.target.encode("🙂")
    assert len(smile) == 4
    translator.read(own, smile[:2])
    assert own.unread
    assert len(own.ids) == before
    translator.read(own, [*smile[2:], *letter, *spaces.target.encode(" keeper")])
    assert not own.unread
    assert own.ids[-1] == spaces.draft.ids[b" keeper"]


def test_what_the_draft_wrote_stays_as_it_wrote_it() -> None:
    spaces = spaces_of("single bytes", "byte level")
    translator = Translator(spaces)
    own = translator.begin(0, spaces.target.encode("The"))
    drafted = spaces.draft.encode(" keeper wrote")
    assert translator.tell(own, drafted) == spaces.target.encode(" keeper wrote")
    translator.reread(own, spaces.target.encode(" keeper wor"), drafted)
    assert said(spaces, own.ids) == b"The keeper wor"
    assert own.ids[: 1 + len(spaces.draft.encode(" keeper"))][-1] == spaces.draft.encode(" keeper")[-1]


def test_special_tokens_between_texts() -> None:
    tokenizer = trained.byte_level()
    twin, _ = trained.permuted(tokenizer, trained.build_for(tokenizer))
    spaces = compare(tokenizer, twin)
    translator = Translator(spaces, ends=[0])
    ids = tokenizer.encode("<|turn|>The keeper<|turn|> wrote")
    own = translator.begin(0, ids)
    assert own.ids == twin.encode("<|turn|>The keeper<|turn|> wrote")
    drafted = twin.encode(" home<|turn|>The<|end|>more")
    assert translator.tell(own, drafted) == tokenizer.encode(" home<|turn|>The<|end|>")
    for reading in (translator.read, lambda own, tokens: translator.reread(own, tokens, drafted)):
        own = translator.begin(0, ids)
        reading(own, tokenizer.encode(" home<|turn|>The"))
        assert own.ids[-len(drafted) :][:1] != []
        assert said(spaces, own.ids).endswith(b" wrote homeThe")
        assert twin.convert_tokens_to_ids("<|turn|>") in own.ids[-3:]


def test_the_end_of_rows_can_be_replaced() -> None:
    sequences = Sequences(torch.tensor([[1, 2], [3, 4]]), capacity=4)
    sequences.retell([0, 0], [[5, 6, 7], [8]])
    assert sequences.lengths == [5, 3] == sequences.device_lengths.tolist()
    sequences.retell([1, 0], [[9], [10, 11, 12]])
    assert sequences.new_tokens == [[5, 6, 9], [8, 10, 11, 12]]
    span = sequences.span(-2, 2)
    assert sequences.read(span, 2).tolist() == [[6, 9], [11, 12]]


# --- found once -------------------------------------------------------------------------------------------------


def test_tokenizers_go_with_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compared = found.compare
    monkeypatch.setattr(found, "compare", lambda *args, **kwargs: calls.append(1) or compared(*args, **kwargs))
    one, other = trained.byte_level.__wrapped__(), trained.metaspace.__wrapped__()
    target, draft = trained.build_for(one), trained.build_for(other)
    sources = Source(tokenizer=one), Source(tokenizer=other)
    pairing = pairing_of(target, draft, *sources)
    assert pairing.spaces is not None
    assert pairing_of(target, draft, *sources) is pairing
    assert len(calls) == 1
    one.add_tokens(["lamplight"])
    assert pairing_of(target, draft, *sources) is not pairing
    watched = weakref.ref(one)
    del pairing, sources, one, target, draft
    gc.collect()
    assert watched() is None


def test_models_without_names_have_no_tokenizers_to_find() -> None:
    target = models.build_target()
    pairing = pairing_of(target, models.build_target(1), Source(), Source(name="no/such-model-anywhere"))
    assert not pairing.is_known
    assert pairing.spaces is None
