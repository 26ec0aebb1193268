"""Pairings on the Hub: the only place that talks to it.

Only files that a pairing names are fetched, after their sizes were looked at, and each into the Hub's own cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from hf_specdec.errors import InvalidPairingError, PairingNotFoundError, SpecDecError, in_short
from hf_specdec.pairing.fields import is_hub_id, quoted
from hf_specdec.pairing.files import LARGEST_TEXT, LARGEST_WEIGHTS, MODEL_SUFFIXES, WEIGHTS, check_name
from hf_specdec.pairing.folder import RECIPE, check_tree, read_folder, recipe_text, verify
from hf_specdec.pairing.schema import (
    FILE_NAME,
    LARGEST_FILE,
    DraftPairing,
    ModelReference,
    PairingSource,
    only_here,
)

TAG = "hf-specdec"
Token = str | bool | None

_STATUS = {
    401: ("the Hub wants to know who asks", "Log in with `hf auth login`, or pass a token that may read it"),
    403: ("the Hub does not allow it", "Ask the owner for access, or pass a token that has it"),
    429: ("the Hub was asked too often", "Wait a few minutes, or log in with `hf auth login`"),
}


def fetch_pairing(
    repo_id: str, *, revision: str | None = None, token: Token = None, local_files_only: bool = False
) -> DraftPairing:
    """Fetch a pairing and the files of its own draft, if it has one; nothing of it is checked but what it says.

    Args:
        repo_id: "organisation/name".
        revision: Branch, tag or commit; None is the main branch.
        token: None takes the stored one.
        local_files_only: Take what was fetched before, ask no Hub.

    Returns:
        The pairing, its `source` with the commit that `revision` stands for.

    Raises:
        PairingNotFoundError: It could not be fetched; the message says what was tried.
        InvalidPairingError: It says something wrong, or names files that are missing or too large.
    """
    found = fetch_if_pairing(repo_id, revision=revision, token=token, local_files_only=local_files_only)
    if found is None:
        raise PairingNotFoundError(
            f"A pairing's repository holds {FILE_NAME}, but {quoted(repo_id)} at {revision or 'main'!r} does not. "
            "Check the id; a plain model goes into `generate(draft_model=…)` as it is."
        )
    fetch_files(found, token=token, local_files_only=local_files_only)
    return found


def fetch_if_pairing(
    repo_id: str, *, revision: str | None = None, token: Token = None, local_files_only: bool = False
) -> DraftPairing | None:
    """Fetch what a repository says of its pairing, without the files of its draft; None if it is no pairing.

    Raises:
        PairingNotFoundError: There is no such repository, or it could not be asked.
        InvalidPairingError: It is a pairing, and a wrong one.
    """
    if not is_hub_id(repo_id):
        raise PairingNotFoundError(
            f'A pairing is named by its local folder or its Hub id ("organisation/name"), but {quoted(repo_id)} is '
            "neither. Check the name."
        )
    what = f"the pairing {quoted(repo_id)} at {revision or 'main'!r}"
    local_files_only = local_files_only or constants.HF_HUB_OFFLINE
    with _as_not_found(what, local_files_only=local_files_only):
        try:
            if not local_files_only:
                address = hf_hub_url(repo_id, FILE_NAME, revision=revision)
                size = get_hf_file_metadata(address, token=token).size or 0
                if size > LARGEST_FILE:
                    raise InvalidPairingError(
                        f"{FILE_NAME} must have at most {LARGEST_FILE} bytes, but that of {quoted(repo_id)} has "
                        f"{size}. Tell its owner."
                    )
            path = hf_hub_download(
                repo_id, FILE_NAME, revision=revision, token=token, local_files_only=local_files_only
            )
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None
        folder = Path(path).parent
        source = PairingSource(folder=str(folder), id=repo_id, revision=folder.name)
        return read_folder(folder, source)


def fetch_files(pairing: DraftPairing, *, token: Token = None, local_files_only: bool = False) -> None:
    """Fetch the files of a fetched pairing's own draft, once the Hub said that all are there and none is too large.

    Raises:
        PairingNotFoundError: They could not be fetched.
        InvalidPairingError: The pairing names files that are missing, too large, or of a kind that is never fetched.
    """
    if pairing.source is None or pairing.source.id is None or not pairing.draft.is_own:
        return
    repo_id, commit = pairing.source.id, pairing.source.revision
    local_files_only = local_files_only or constants.HF_HUB_OFFLINE
    for name in pairing.files:
        check_name(name)
    with _as_not_found(f"the draft in the pairing {str(pairing.source)!r}", local_files_only=local_files_only):
        if not local_files_only:
            infos = HfApi().get_paths_info(repo_id, list(pairing.files), revision=commit, token=token)
            _check_sizes(pairing, {info.path: info.size for info in infos if isinstance(info, RepoFile)})
        for name in pairing.files:
            hf_hub_download(repo_id, name, revision=commit, token=token, local_files_only=local_files_only)


def fetch_model(model: ModelReference, *, token: Token = None) -> str:
    """Fetch the subfolder of a repository that holds a draft, and return the local folder.

    Raises:
        PairingNotFoundError: It could not be fetched.
    """
    patterns = [f"{model.subfolder}/*{suffix}" for suffix in MODEL_SUFFIXES]
    with _as_not_found(f"the draft {str(model)!r}", local_files_only=constants.HF_HUB_OFFLINE):
        folder = snapshot_download(model.id, revision=model.revision, allow_patterns=patterns, token=token)
    return os.path.join(folder, model.subfolder or "")


def search_pairings(target_id: str, *, limit: int = 5, token: Token = None) -> list[str]:
    """Return the ids of repositories that say they are pairings for a target, the most downloaded first.

    Raises:
        PairingNotFoundError: The Hub could not be asked.
    """
    with _as_not_found(f"pairings for {quoted(target_id)}", local_files_only=constants.HF_HUB_OFFLINE):
        found = HfApi().list_models(filter=[TAG, f"base_model:{target_id}"], sort="downloads", limit=limit, token=token)
        return [model.id for model in found]


def push_pairing(
    pairing: DraftPairing,
    repo_id: str,
    *,
    private: bool | None = None,
    token: Token = None,
    commit_message: str | None = None,
) -> str:
    """Publish a pairing as one commit; see `DraftPairing.push_to_hub`."""
    if not is_hub_id(repo_id):
        raise PairingNotFoundError(
            f'A repository on the Hub is called "organisation/name", but {quoted(repo_id)} was given. Correct it.'
        )
    if local := only_here(pairing):
        raise InvalidPairingError(
            f"A published pairing names models that others have, but {' and '.join(f'its {role}' for role in local)} "
            f"{'is a path' if len(local) == 1 else 'are paths'} on this machine. "
            + (
                "Publish the target first and give its Hub id."
                if "target" in local
                else "Publish the draft first and give its Hub id, or save it into the pairing (`--save-draft`)."
            )
        )
    verify(pairing, trust_remote_code=True)
    contents: dict[str, bytes | str] = {name: recipe_text(name).encode() for name in RECIPE}
    if pairing.source is not None:
        folder = Path(pairing.source.folder)
        contents |= {name: str(folder / name) for name in check_tree(folder)}
    contents[FILE_NAME] = pairing.to_json().encode()
    additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()]
    message = commit_message or f"Draft pairing: {pairing.draft} for {pairing.target}"
    api = HfApi(token=token)
    with _as_not_found(f"the repository {quoted(repo_id)}", local_files_only=constants.HF_HUB_OFFLINE, verb="publish"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.create_commit(repo_id, additions, commit_message=message).commit_url)


def _check_sizes(pairing: DraftPairing, sizes: dict[str, int]) -> None:
    for name in pairing.files:
        largest = LARGEST_WEIGHTS if name.endswith(WEIGHTS) else LARGEST_TEXT
        if name not in sizes or sizes[name] > largest:
            why = f"has {sizes[name]} bytes, more than the {largest} allowed" if name in sizes else "is not there"
            raise InvalidPairingError(
                f"`files` of {FILE_NAME} lists what the repository holds, but {quoted(name)} {why} in "
                f"{str(pairing.source)!r}. Tell its owner."
            )


# ---- what went wrong -----------------------------------------------------------------------------------------------


@contextmanager
def _as_not_found(what: str, *, local_files_only: bool, verb: str = "fetch") -> Iterator[None]:
    """Turn every failure of the Hub's client into an error that says what was tried and what to do."""
    try:
        yield
    except SpecDecError:
        raise
    except Exception as error:  # besides its own errors the client lets those of its HTTP library and of disks through
        why, remedy = _explained(error, local_files_only=local_files_only)
        raise PairingNotFoundError(f"Could not {verb} {what} ({constants.ENDPOINT}): {why}. {remedy}.") from error


def _explained(error: Exception, *, local_files_only: bool) -> tuple[str, str]:
    """Return why the Hub gave nothing, and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return "it is gated", "Accept its terms on its page on the Hub, and log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such branch, tag or commit", "Check the revision"
    if isinstance(error, RepositoryNotFoundError):
        # The Hub does not tell strangers which of the two it is.
        return "it does not exist, or is private", "Check the id, or log in with `hf auth login`"
    if local_files_only and isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return (
            "it was not fetched before, and the Hub may not be asked (`local_files_only` or HF_HUB_OFFLINE)",
            "Go online once, or give a local folder",
        )
    if status in _STATUS:
        return _STATUS[status]
    if isinstance(error, HfHubHTTPError) and status is not None:
        return f"the Hub answered with status {status}", "Try again later"
    return (
        f"the Hub could not be reached, or sent something else ({in_short(error)})",
        "Check the connection, try again",
    )
