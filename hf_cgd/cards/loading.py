"""Reading reports and records back, from a folder or from the Hub."""

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from hf_cgd.cards.record import EVALUATED_ONLY, REPORT_FILE, RUN_FILE, RunRecord
from hf_cgd.metrics import GroupReport


def load_reports(place: str | os.PathLike[str], *, revision: str | None = None) -> dict[str, GroupReport]:
    """All reports of a run by evaluation set.

    Args:
        place: a run's folder, a report's file, or the id of a repository on the Hub.
        revision: of the repository; None for its newest.

    Raises:
        ValueError: there is no report, or a file that is none.
        OSError: the Hub cannot be reached.
    """
    content = _read(place, REPORT_FILE, revision)
    if content is None:
        raise ValueError(
            f"{os.fspath(place)} holds no {REPORT_FILE}: expected the folder of a run, or the id of a repository that "
            "GroupRobustTrainer.push_to_hub() wrote."
        )
    sets = content if isinstance(content, dict) and "groups" not in content else {"": content}
    try:
        return {name: GroupReport.from_dict(report) for name, report in sets.items()}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{REPORT_FILE} of {os.fspath(place)}: {error}") from error


def load_report(
    place: str | os.PathLike[str], evaluation_set: str | None = None, *, revision: str | None = None
) -> GroupReport:
    """One report of a run.

        print(load_report("user/model"))

    Args:
        place, revision: see `load_reports`.
        evaluation_set: "validation", "test", …; None for "test" where there is one, else for the first.

    Raises:
        ValueError: see `load_reports`; or no report of that set.
    """
    reports = load_reports(place, revision=revision)
    if not reports:
        raise ValueError(f"{os.fspath(place)}: no evaluation set was reported. Evaluate the model first.")
    wanted = evaluation_set or ("test" if "test" in reports else next(iter(reports)))
    if wanted not in reports:
        raise ValueError(f"{os.fspath(place)} has no report of {wanted!r}; it has {list(reports)}.")
    return reports[wanted]


def load_run(place: str | os.PathLike[str], *, revision: str | None = None) -> RunRecord:
    """The whole record of a run: reports, settings, weights over time.

    A folder with reports only (of an older version) gives a record of these.

    Args:
        place, revision: see `load_reports`.

    Raises:
        ValueError, OSError: see `load_reports`.
    """
    reports = load_reports(place, revision=revision)
    folder = Path(place).parent if Path(place).is_file() else place
    content = _read(folder, RUN_FILE, revision)
    if content is None:
        objectives = {report.objective for report in reports.values()}
        name = Path(os.fspath(folder)).name
        known = objectives - {"", EVALUATED_ONLY}
        return RunRecord(name, {"name": known.pop()} if len(known) == 1 else None, reports=reports)
    try:
        return RunRecord.from_dict(content, reports)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{RUN_FILE} of {os.fspath(folder)} is not the record of a run: {error!r}.") from error


def _read(place: str | os.PathLike[str], name: str, revision: str | None) -> Any:
    """The content of a file of JSON, None where there is none."""
    path = Path(place)
    if path.is_file():
        found = path
    elif path.is_dir():
        found = path / name
        if not found.is_file():
            return None
    else:
        try:
            found = Path(hf_hub_download(os.fspath(place), name, revision=revision))
        except LocalEntryNotFoundError as error:
            raise FileNotFoundError(
                f"{os.fspath(place)}: expected the folder of a run, or the id of a repository on the Hub. There is no "
                f"such folder, and the Hub could not be asked: {error}"
            ) from error
        except EntryNotFoundError:
            return None
        except HFValidationError as error:
            raise ValueError(
                f"{os.fspath(place)} is no folder, and no id of a repository ('user/name') either."
            ) from error
    try:
        return json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{found} is not JSON ({error}). It was cut off or changed: write it again (trainer.create_model_card()), "
            "or take another copy."
        ) from error
