"""What went wrong with a name on the Hugging Face Hub, in one line with a remedy."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jshard.storage.hub.online.names import Name
from jshard.system.errors import RunFailed, UserError, is_disk_full, some_of
from jshard.system.formatting import did_you_mean, one_line

_BUSY = (408, 429, 500, 502, 503, 504)
LOGIN = "`hf auth login`, or set HF_TOKEN"


def passes(error: BaseException) -> bool:
    """Returns whether the Hub may answer when asked again: it is busy, or was cut off.

    Not if it cannot be reached at all: the library has tried.
    """
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  of httpx or httpx2
    )

    for one in _chain(error):
        if isinstance(one, HTTPError):
            status = _status(one)
            if status in _BUSY or (not status and "Connect" not in type(one).__name__):
                return True
    return False


def explained(name: Name, error: Exception, what: str = "download") -> Exception:
    """Returns the error to raise for one of huggingface_hub's.

    `what` was tried: to "download" to the cache, or to "write" to the Hub.
    """
    from huggingface_hub import constants, errors, get_token

    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    chain = list(_chain(error))
    for one in chain:
        if is_disk_full(one):
            return RunFailed(
                f"the disk of {cache} is full, to which {name} is downloaded: make "
                "room, or set HF_HOME to a folder on another one"
            )
    if isinstance(error, errors.GatedRepoError):
        page = f"{endpoint}/{'datasets/' * (name.kind == 'dataset')}{name.repository}"
        how = f"run {LOGIN}" if not get_token() else "wait until your token has access"
        return UserError(f"{name} is gated: accept its licence at {page}, and {how}")
    if what == "write" and not isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"cannot write {name}: {reason(error)}")
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
        folders = Path(cache).glob(f"{name.kind}s--*--*")
        names = [x.name.split("--", 1)[1].replace("--", "/") for x in folders]
        near = did_you_mean(name.repository, names)
        return UserError(
            f"there is neither a folder {name.repository} here nor {name} in the cache "
            f"{cache}{near}; HF_HUB_OFFLINE is set, so it is not downloaded"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{name}: no such revision{_revisions(name)}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(_unknown(name, endpoint))
    if 401 in map(_status, chain):
        return UserError(
            f"{endpoint} refuses the token with which {name} is asked for: run {LOGIN}"
        )
    return UserError(f"cannot download {name} to the cache {cache}: {reason(error)}")


def reason(error: BaseException) -> str:
    """Returns why a request failed, in a few words."""
    from huggingface_hub import constants

    *_, first = _chain(error)
    if status := next(filter(None, map(_status, _chain(error))), None):
        return f"{constants.ENDPOINT} answers {status}"
    return f"{one_line(str(first)) or type(first).__name__} ({constants.ENDPOINT})"


def lacks(name: Name, what: str) -> UserError:
    """Returns the error of a repository without a file, with those that it has."""
    from huggingface_hub import list_repo_files

    found = _ask(
        lambda: list_repo_files(
            name.repository, repo_type=name.kind, revision=name.commit
        )
    )
    return UserError(f"{name} has no {what}" + f", but {some_of(found)}" * bool(found))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _unknown(name: Name, endpoint: str) -> str:
    """Says that there is no such repository, and what else it may be."""
    import huggingface_hub as hub

    owner, _, own = name.repository.partition("/")
    is_model = name.kind == "model"
    if is_model and _ask(lambda: [hub.dataset_info(name.repository).id]):
        return (
            f"{name.repository} is a dataset, where a model is needed: "
            f"--config.data.path=hf://datasets/{name.repository} reads its files"
        )
    search: Any = hub.list_models if is_model else hub.list_datasets
    near = _ask(lambda: [one.id for one in search(author=owner, limit=500)])
    near += _ask(lambda: [one.id for one in search(search=own, limit=50)])
    return (
        f"there is neither a folder {name.repository} here nor a {name.kind} of that "
        f"name on {endpoint}{did_you_mean(name.repository, near)}; a private one needs "
        f"{LOGIN}"
    )


def _revisions(name: Name) -> str:
    """Lists the branches and tags of a repository."""
    from huggingface_hub import list_repo_refs

    def listed() -> list[str]:
        refs = list_repo_refs(name.repository, repo_type=name.kind)
        return [ref.name for ref in (*refs.branches, *refs.tags)]

    found = _ask(listed)
    return f"; it has {some_of(found)}" * bool(found)


def _ask(question: Callable[[], Iterable[str]]) -> list[str]:
    """Returns the Hub's answer, for a hint; nothing where there is none."""
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  of httpx or httpx2
    )

    try:
        return list(question())
    except (OSError, HTTPError):
        return []
