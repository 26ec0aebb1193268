"""`draft_pairing.json`: what is read back, and what is refused with which words."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pairing.building import COMMITS, DIGEST, build_measurement, build_pairing

from hf_specdec import DraftPairing, InvalidPairingError
from hf_specdec.pairing.fields import is_hub_id, is_safe_name
from hf_specdec.pairing.schema import ModelReference, PairingSource, only_here, parse_pairing

OWN_DRAFT = ModelReference(id=".", subfolder="draft")
OWN_FILES = {"draft/config.json": DIGEST, "draft/model.safetensors": DIGEST}


def valid() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(build_pairing().to_json())
    return values


# ---- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairing",
    [
        build_pairing(),
        build_pairing(draft=OWN_DRAFT, files=OWN_FILES, controller_hints=None, num_draft_tokens=7),
        build_pairing(target=ModelReference(id="/models/large"), draft=ModelReference(id="C:/models/small")),
        DraftPairing(
            target=ModelReference(id="gpt2", revision=COMMITS[0]), draft=ModelReference(id="x", revision=COMMITS[0])
        ),
    ],
)
def test_what_is_written_is_read_back(pairing: DraftPairing) -> None:
    assert parse_pairing(pairing.to_json()) == pairing
    assert copy.deepcopy(pairing) == pickle.loads(pickle.dumps(pairing)) == pairing
    assert hash(copy.deepcopy(pairing)) == hash(pairing)


def test_where_it_was_read_from_is_no_part_of_it() -> None:
    source = PairingSource(folder="/cache/snapshot", id="org/pairing", revision=COMMITS[0])
    pairing = build_pairing(source=source)
    assert pairing == build_pairing()
    assert "source" not in json.loads(pairing.to_json())
    assert str(source) == "org/pairing@0123456789ab"
    assert str(PairingSource(folder="/cache/snapshot")) == "/cache/snapshot"
    assert str(PairingSource(folder="/cache/snapshot", id="org/pairing")) == "org/pairing@main"


def test_optional_fields_may_be_left_out() -> None:
    values = valid()
    pairing = parse_pairing(json.dumps({name: values[name] for name in ("target", "draft")}))
    assert (pairing.num_draft_tokens, pairing.draft_quantization, pairing.measurements) == ("auto", "auto", ())


def test_a_reference_is_named_in_short() -> None:
    assert str(build_pairing().target) == "org/large@0123456789ab"
    assert str(ModelReference(id="/models/large")) == "/models/large"
    assert only_here(build_pairing(target=ModelReference(id="/models/large"))) == ["target"]
    assert only_here(build_pairing()) == []


# ---- refused, field by field ---------------------------------------------------------------------------------------


def change(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(values: dict[str, Any]) -> None:
        inner: Any = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return apply


def remove(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def apply(values: dict[str, Any]) -> None:
        inner: Any = values
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return apply


WRONG: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (change("tokeniser_fingerprint", value="x"), "has no field 'tokeniser_fingerprint'.*`tokenizer_fingerprint`"),
    (change("source", value=None), "has no field 'source'"),
    (change("target", "ids", value="x"), "`target` has no field 'ids'. Did you mean `id`"),
    (change("measurements", 1, "speedup", value=2), r"`measurements\[1\]` has no field 'speedup'.*`speed_up`"),
    (remove("draft"), "must have the field `draft`, but it is missing"),
    (remove("target", "id"), "`target` must have the field `id`"),
    (remove("measurements", 0, "hardware"), r"`measurements\[0\]` must have the field `hardware`"),
    (change("target", value="org/large"), "`target` must be an object, but is 'org/large'"),
    (change("measurements", value={}), "`measurements` must be a list"),
    (change("measurements", value=[3]), r"`measurements\[0\]` must be an object, but is 3"),
    (change("schema_version", value=2), "is 2. Update hf-specdec"),
    (change("schema_version", value=True), r"but is True \(bool\)"),
    (change("schema_version", value=1.0), r"but is 1.0 \(float\)"),
    (change("target", value={"id": ".", "subfolder": "x"}), "Only the draft can lie in the pairing's own folder"),
    (change("target", "id", value="../large"), "must be a Hub id"),
    (change("target", "id", value="/models/../etc"), "must be a Hub id"),
    (change("draft", "id", value="org/small/extra"), "must be a Hub id"),
    (change("draft", "id", value="datasets--x"), "must be a Hub id"),
    (change("draft", "id", value=""), "must be a non-empty string"),
    (change("draft", "id", value="a\u202eb"), "printable characters"),
    (change("draft", "revision", value="main"), "must be a commit of 40 hexadecimal digits, but is 'main'"),
    (change("draft", "revision", value=None), "`draft.revision` must be the commit that was used"),
    (change("target", "revision", value=None), "`target.revision` must be the commit"),
    (change("target", "id", value="/models/large"), "`revision` is for models on the Hub"),
    (change("draft", "subfolder", value="../up"), "path inside the repository"),
    (change("draft", "subfolder", value="/etc"), "path inside the repository"),
    (change("draft", "subfolder", value="a//b"), "path inside the repository"),
    (change("draft", "subfolder", value="a\\b"), "path inside the repository"),
    (change("draft", value={"id": ".", "subfolder": "draft"}), "`files` must give the sha256 of every file"),
    (change("draft", value={"id": "."}), "needs a `subfolder` of its own"),
    (change("files", value={"weights/latest/x": DIGEST}), "`files` are for a draft in the pairing's own folder"),
    (change("files", value={"weights/latest/../x": DIGEST}), "but has 'weights/latest/../x'. Take it out"),
    (change("files", value={"draft/config.json": DIGEST}), "but has 'draft/config.json'"),
    (change("files", value={"weights/latest/x": "md5:0"}), "64 hexadecimal digits, but is 'md5:0'"),
    (change("files", value=[]), "`files` must be an object"),
    (change("tokenizer_fingerprint", value="ab" * 32), "64 hexadecimal digits"),
    (change("draft_tokenizer_fingerprint", value=3), r"64 hexadecimal digits, but is 3 \(int\)"),
    (change("draft_quantization", value="int4"), "must be one of 'auto', 'none', 'nf4'"),
    (change("num_draft_tokens", value=0), "between 1 and 256"),
    (change("num_draft_tokens", value=True), "between 1 and 256"),
    (change("num_draft_tokens", value=4), '`controller_hints` are for `num_draft_tokens` "auto", but that is 4'),
    (change("controller_hints", value={"oracle": 1}), "`controller_hints` has no key 'oracle'"),
    (change("controller_hints", value={"survival": [0.1, 0.9]}), "must not rise"),
    (change("controller_hints", value=[]), "must be a mapping, but is list"),
    (change("description", value="x" * 5000), "with 5000"),
    (change("description", value="a\x00b"), "printable characters"),
    (change("description", value="\ud800"), "printable characters"),
    (change("measurements", 0, "workload", value="chat\n---"), r"in `measurements\[0\]`, `workload` must be"),
    (change("measurements", 0, "temperature", value=-1), "between 0 and 100, but is -1"),
    (change("measurements", 0, "acceptance_rate", value=1.01), "between 0 and 1, but is 1.01"),
    (change("measurements", 0, "acceptance_rate", value="0.5"), r"between 0 and 1, but is '0.5' \(str\)"),
    (change("measurements", 0, "mean_acceptance_length", value=0.5), "between 1 and 257"),
    (change("measurements", 0, "batch_size", value=0), "between 1 and 1000000000"),
    (change("measurements", 0, "num_prompts", value=10**80), "but is a huge integer"),
    (change("measurements", 0, "speed_up", value=9), "must lie in its range, but is 9 and the range is 1.7 to 2.2"),
    (change("measurements", 0, "speed_up_high", value=1e400), "there is Infinity"),
    (change("measurements", 0, "speed_up_high", value=float("nan")), "there is NaN"),
    (change("measurements", 0, "versions", value=["torch"]), "`versions` must be an object"),
    (change("measurements", 0, "versions", value={"torch": 2}), r"`versions\['torch'\]` must be a non-empty string"),
    (change("measurements", 0, "date", value="2026-02-30"), "must be a day such as"),
    (change("measurements", 0, "date", value="20260228"), "must be a day such as"),
    (change("measurements", value=[json.loads(build_pairing().to_json())["measurements"][0]] * 257), "but has 257"),
]


@pytest.mark.parametrize(("apply", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_field_is_named(apply: Callable[[dict[str, Any]], None], words: str) -> None:
    values = valid()
    apply(values)
    with pytest.raises(InvalidPairingError, match=words) as caught:
        parse_pairing(json.dumps(values))
    assert str(caught.value).startswith("draft_pairing.json")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "a pairing must be an object, but is \\[\\]"),
        ("null", "must be an object"),
        ("{} {}", "Extra data"),
        ('{"target": 1, "target": 2}', "'target' stands twice"),
        ("[" * 200_000, "is nested far deeper|maximum recursion"),
        ('{"target": ' + "[" * 50_000 + "]" * 50_000 + "}", "is nested far deeper|`target` must be an object"),
        ('{"schema_version": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"description": "' + "x" * 2**20 + '"}', "at most 1048576 bytes"),
        ('{"description": "' + "\ud800" * 2**19 + '"}', "at most 1048576 bytes"),
        ("\ufeff{}", "BOM"),
    ],
    ids=range(11),
)
def test_what_is_no_object_is_said(text: str, words: str) -> None:
    with pytest.raises(InvalidPairingError, match=words) as caught:
        parse_pairing(text)
    assert len(str(caught.value)) < 1000


def test_bytes_are_not_text() -> None:
    with pytest.raises(InvalidPairingError, match="must be text, but is bytes"):
        parse_pairing(b"{}")  # type: ignore[arg-type]


def test_the_same_rules_hold_for_a_pairing_made_in_memory() -> None:
    with pytest.raises(InvalidPairingError, match="must be a ModelReference"):
        build_pairing(target="org/large")
    with pytest.raises(InvalidPairingError, match="must be a tuple of Measurement"):
        build_pairing(measurements=[build_measurement()])
    with pytest.raises(InvalidPairingError, match="at most 256 entries"):
        build_pairing(measurements=(build_measurement(),) * 257)
    unpinned = build_pairing(draft=ModelReference(id="org/small"))
    with pytest.raises(InvalidPairingError, match=r"`draft.revision` must be the commit"):
        unpinned.to_json()


# ---- names ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aZ0-._/ é", max_size=12) | st.text(alphabet="ab/", min_size=90, max_size=200))
@example("a" * 96 + "/" + "b" * 96)
@example("a" * 97)
@example("org/name.git")
def test_hub_ids_are_those_of_the_hub(value: str) -> None:
    try:
        validate_repo_id(value)
    except HFValidationError:
        assert not is_hub_id(value)
    else:
        assert is_hub_id(value)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\\b", "C:a", "a\nb", "x" * 5000])
def test_names_that_leave_the_folder(name: str) -> None:
    assert not is_safe_name(name)


# ---- anything at all -----------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


def parsed_or_refused(text: str) -> None:
    try:
        pairing = parse_pairing(text)
    except InvalidPairingError as error:
        assert len(str(error)) < 6000  # noqa: PT017
    else:
        assert parse_pairing(pairing.to_json()) == pairing


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text(text: str) -> None:
    parsed_or_refused(text)


def places(values: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    keys = list(values) if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else []
    return [path, *(place for key in keys for place in places(values[key], (*path, key)))]


PLACES = [place for place in places(valid()) if place]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), JSON_VALUES)
def test_any_value_in_any_place(place: tuple[str | int, ...], value: Any) -> None:
    values = valid()
    change(*place, value=value)(values)
    parsed_or_refused(json.dumps(values))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_to_the_text(data: st.DataObject) -> None:
    text = build_pairing().to_json()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    parsed_or_refused(text[:start] + data.draw(st.text(max_size=6)) + text[end:])


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        build_pairing,
        description=st.none() | st.text(alphabet=st.characters(categories=["L", "N", "P"]), min_size=1, max_size=50),
        num_draft_tokens=st.just("auto") | st.integers(1, 256),
        controller_hints=st.none(),
        draft_quantization=st.sampled_from(["auto", "none", "nf4", "fp4", "int8"]),
        measurements=st.lists(
            st.builds(build_measurement, temperature=st.floats(0, 100), acceptance_rate=st.floats(0, 1)), max_size=3
        ).map(tuple),
    )
)
def test_any_pairing_is_read_back(pairing: DraftPairing) -> None:
    assert parse_pairing(pairing.to_json()) == pairing
