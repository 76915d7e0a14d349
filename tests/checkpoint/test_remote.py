"""Checkpoints in object storage, which a local folder stands for: uploads, fetching, two writers, damage."""

import json
import shutil
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from megamoe import object_storage
from megamoe.checkpoint import remote
from megamoe.checkpoint.format.files import SUMS
from megamoe.checkpoint.format.folder import inode_of
from megamoe.checkpoint.remote import RemoteFolder, fetch_newest, replace_damaged
from megamoe.checkpoint.uploads import Uploads, open_uploads
from megamoe.errors import ExitCode, UserError
from megamoe.object_storage import RemoteError
from megamoe.train.loop import train
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.tiny import restored_process, tiny

RUN = ("name=a", "checkpoint={every: 2, keep: 2}", "evaluation.batches=0")


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(object_storage, "WAITS_S", (0.0, 0.0))
    return tmp_path / "storage"


def run(output: Path, storage: Path, *overrides: str) -> list[dict[str, Any]]:
    url = f"checkpoint.remote=file://{storage}"
    with restored_process():
        assert train(tiny(f"output={output}", *RUN, url, *overrides)) == ExitCode.FINISHED
    return [json.loads(line) for line in (output / "a/metrics.jsonl").read_text().splitlines()]


def steps(storage: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (storage / "a").glob("step_*"))


def test_a_run_goes_on_on_an_empty_machine(tmp_path: Path, storage: Path) -> None:
    whole = run(tmp_path / "whole", tmp_path / "other", "train.steps=6")
    assert steps(tmp_path / "other") == ["step_00000004", "step_00000006"]  # the newest two, as on the disk
    run(tmp_path / "first", storage, "train.steps=6", "train.exit_after_steps=4")
    shutil.rmtree(tmp_path / "first")
    rows = run(tmp_path / "second", storage, "train.steps=6", "checkpoint.resume=auto")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in whole]
    last = "a/checkpoints/step_00000006"
    assert_same_bits(read_tensors(tmp_path / "second" / last), read_tensors(tmp_path / "whole" / last))
    assert steps(storage) == ["step_00000004", "step_00000006"]
    latest = (storage / "a/latest").read_text()
    listed = (storage / "a" / latest / SUMS).read_bytes()
    assert listed == (tmp_path / "second" / last / SUMS).read_bytes()
    # A run that has ended is there already: nothing is uploaded again.
    before = {path: path.stat().st_mtime_ns for path in (storage / "a").glob("step_*/*")}
    run(tmp_path / "second", storage, "train.steps=6", "checkpoint.resume=auto")
    assert {path: path.stat().st_mtime_ns for path in (storage / "a").glob("step_*/*")} == before


def test_a_damaged_checkpoint_is_told_and_next_is_taken(tmp_path: Path, storage: Path, capfd: Any) -> None:
    run(tmp_path / "first", storage)
    newest = storage / "a" / (storage / "a/latest").read_text()
    damage(newest)
    rows = run(tmp_path / "second", storage, "checkpoint.resume=auto")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    told = capfd.readouterr().out
    assert f"damaged: {newest.name}: shard_00000.safetensors: damaged, its SHA-256" in told
    assert "fetched" in told and not list((tmp_path / "second/a/checkpoints").glob(".fetching_*"))
    for left in (storage / "a").glob("step_*"):
        next(left.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="no intact checkpoint: .*missing"):
        run(tmp_path / "third", storage, "checkpoint.resume=auto")


def test_a_machine_with_older_checkpoints_fetches_newest(tmp_path: Path, storage: Path, capfd: Any) -> None:
    """A machine that comes back must not go on from where it was, and delete what others have done since."""
    whole = run(tmp_path / "whole", tmp_path / "other", "train.steps=8")
    run(tmp_path / "first", storage, "train.steps=8", "train.exit_after_steps=3")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    run(tmp_path / "second", storage, "train.steps=8", "checkpoint.resume=auto", "train.exit_after_steps=3")
    capfd.readouterr()
    rows = run(tmp_path / "first", storage, "train.steps=8", "checkpoint.resume=auto")
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in whole]
    assert steps(storage) == ["step_00000006", "step_00000008"]
    told = capfd.readouterr().out
    assert f", of a later step than {tmp_path}/first/a/checkpoints/step_00000003" in told
    aside = (tmp_path / "first/a/metrics.jsonl.before-1").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [1, 2, 3]


def test_going_back_deletes_no_later_checkpoint(tmp_path: Path, storage: Path, capfd: Any) -> None:
    back = f"checkpoint.resume={tmp_path}/first/a/checkpoints/step_00000002"
    run(tmp_path / "first", storage, "train.steps=8", "checkpoint.keep=9")
    last = (storage / "a/latest").read_text()
    run(tmp_path / "first", storage, "train.steps=8", back, "train.exit_after_steps=2", "checkpoint.keep=1")
    assert (storage / "a" / last / SUMS).exists() and "step_00000004" in (storage / "a/latest").read_text()
    assert f"{last} is of a later step than step_00000002; it stays until this run" in capfd.readouterr().out
    run(tmp_path / "first", storage, "train.steps=8", "checkpoint.resume=auto", "checkpoint.keep=1")
    assert steps(storage) == ["step_00000008"] and (storage / "a/latest").read_text() != last


def fetched(folder: Path, storage: Path, told: list[str], is_first: bool = True) -> str:
    """Fetch as a resume does; return the name of the newest local checkpoint."""
    fetch_newest(RemoteFolder(f"file://{storage}", "a"), folder, told.append, is_first)
    return (folder / "checkpoints/latest").read_text()


def test_what_is_fetched_beside_local_checkpoints(tmp_path: Path, storage: Path, monkeypatch: Any) -> None:
    first, told = tmp_path / "first/a", list[str]()
    run(tmp_path / "first", storage, "train.steps=6", "checkpoint={every: 2, keep: 9}")
    local, latest = first / "checkpoints", storage / "a/step_00000006-4f2a91c0"
    for path in local.glob("step_*"):
        shutil.copytree(path, storage / "a" / f"{path.name}-4f2a91c0")
    (storage / "a/latest").write_text(latest.name)
    (local / "latest").write_text("step_00000002")  # the user has gone back
    assert fetched(first, storage, told) == "step_00000002" and not told
    shutil.rmtree(latest)  # the storage lacks the newest
    (storage / "a/latest").write_text("step_00000004-4f2a91c0")
    (local / "latest").write_text("step_00000006")
    assert fetched(first, storage, told) == "step_00000006" and not told
    # Damaged ones do not count, and stay.
    for path in (local / "step_00000006", local / "step_00000004"):
        with (path / "checkpoint.json").open("a") as file:
            file.write(" ")
    assert fetched(first, storage, told) == "step_00000004"
    assert (local / "step_00000004.before-1/checkpoint.json").read_text().endswith(" ")
    assert any("step_00000004 is step_00000004.before-1 now" in line for line in told)
    # What is damaged in the storage is fetched by one rank alone.
    shutil.rmtree(local / "step_00000004")
    (local / "latest").write_text("step_00000002")
    next((storage / "a").glob("step_00000004-*/*.safetensors")).write_bytes(b"")
    told.clear()
    assert fetched(first, storage, told) == "step_00000002" and len(told) == 1
    monkeypatch.setattr(RemoteFolder, "get", lambda *unused: pytest.fail("fetched again"))
    assert fetched(first, storage, told) == "step_00000002" and told[0] == told[1]


def test_a_storage_that_is_away_ends_the_first_rank_alone(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may lack the way to it, as long as their machine has a checkpoint."""

    def away(*unused: object, **also_unused: object) -> None:
        raise RemoteError("away")

    run(tmp_path / "first", storage, "train.steps=2")
    monkeypatch.setattr(RemoteFolder, "read", away)
    monkeypatch.setattr(RemoteFolder, "folders", away)
    assert fetched(tmp_path / "first/a", storage, [], is_first=False) == "step_00000002"
    with pytest.raises(UserError, match="does not answer as expected: away"):
        fetched(tmp_path / "first/a", storage, [])
    with pytest.raises(UserError, match="does not answer as expected: away"):
        fetched(tmp_path / "second/a", storage, [], is_first=False)


def test_a_checkpoint_that_is_deleted_meanwhile_hides_no_other(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an earlier launch that is still alive: the run would begin at step 0."""
    place = RemoteFolder(f"file://{storage}", "a")
    old, new = (made(storage / f"a/step_0000000{step}-4f2a91c0") for step in (2, 4))
    (storage / "a/latest").write_text(new.name)
    find = place._fs.find

    def find_and_delete(path: str) -> Any:
        found = find(path)
        shutil.rmtree(old, ignore_errors=True)
        return found

    monkeypatch.setattr(place._fs, "find", find_and_delete)
    assert place.complete() == [new.name]


def test_a_listing_without_what_latest_names_is_no_empty_storage(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RemoteFolder(f"file://{storage}", "a")
    new = made(storage / "a/step_00000004-4f2a91c0")
    (storage / "a/latest").write_text(new.name)
    find = place._fs.find
    listings: list[list[str]] = [[]]
    monkeypatch.setattr(place._fs, "find", lambda path: listings.pop() if listings else find(path))
    assert place.complete() == [new.name]
    shutil.rmtree(new)
    with pytest.raises(UserError, match="`latest` names step_00000004-4f2a91c0, but no complete checkpoint"):
        fetched(tmp_path / "first/a", storage, [])
    place.delete_all()  # as overwrite=true does
    assert place.complete() == [] and not (storage / "a/latest").exists()


def damage(checkpoint: Path) -> None:
    """Change a bit of the tensors."""
    shard = next(checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_a_damaged_local_checkpoint_is_replaced_by_the_copy_in_the_storage(
    tmp_path: Path, storage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its JSON files are intact. Without a copy the next older one is taken."""
    run(tmp_path / "first", storage)
    newest = tmp_path / "first/a/checkpoints/step_00000004"
    damage(newest)
    rows = run(tmp_path / "first", storage, "checkpoint.resume=auto", "train.steps=6")
    told = capfd.readouterr().out
    assert f"damaged: {newest}: " in told
    assert f"fetched step_00000004 from file://{storage}/a in place" in told
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and "going on from" not in told
    assert newest.with_name("step_00000004.before-1").is_dir()
    shutil.rmtree(next((storage / "a").glob("step_00000006-*")))
    damage(tmp_path / "first/a/checkpoints/step_00000006")
    run(tmp_path / "first", storage, "checkpoint.resume=auto", "train.steps=6")
    told = capfd.readouterr().out
    assert f"file://{storage}/a has no copy of step_00000006" in told and f"going on from {newest}" in told


def test_of_the_processes_of_a_machine_one_replaces_a_damaged_checkpoint(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, told = RemoteFolder(f"file://{storage}", "a"), list[str]()
    path = made(tmp_path / "a/checkpoints/step_00000004")
    shutil.copytree(path, storage / "a/step_00000004-4f2a91c0")
    (path / "checkpoint.json").write_text("damaged")
    inode = inode_of(path)
    assert replace_damaged(place, told.append, path, inode)
    assert (path / "checkpoint.json").read_text() == '{"step": 4}'
    assert replace_damaged(place, told.append, path, inode) and told[-1] == told[-2]  # the next process
    assert [each.name for each in path.parent.glob("*.before-*")] == ["step_00000004.before-1"]

    def away(*unused: object, **also_unused: object) -> None:
        raise RemoteError("away")

    monkeypatch.setattr(RemoteFolder, "read", away)
    assert not replace_damaged(place, told.append, path, inode_of(path))
    assert told[-1].endswith(f"step_00000004 cannot be fetched from file://{storage}/a: away")


def test_a_damaged_local_checkpoint_is_not_uploaded(tmp_path: Path, storage: Path) -> None:
    """The storage lacks both checkpoints, as after a job whose uploads did not arrive."""
    run(tmp_path / "first", storage, "checkpoint.remote=null")
    damage(tmp_path / "first/a/checkpoints/step_00000004")
    run(tmp_path / "first", storage, "checkpoint.resume=auto", "train.exit_after_steps=1")
    assert steps(storage)[0] == "step_00000002" and "step_00000004" not in steps(storage)


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path, storage: Path) -> None:
    run(tmp_path / "first", storage, "train.steps=2")
    before = (storage / "a/latest").read_text()
    with pytest.raises(UserError, match=r"checkpoint.remote: .* holds step_00000002-\w+: add --resume"):
        run(tmp_path / "second", storage)
    assert (storage / "a/latest").read_text() == before
    elsewhere = tmp_path / "first/a/checkpoints/step_00000002"
    with pytest.raises(UserError, match="holds step_00000002"):
        run(tmp_path / "third", storage, f"checkpoint.resume={elsewhere}")
    run(tmp_path / "second", storage, "overwrite=true", "train.steps=4")
    assert steps(storage) == ["step_00000002", "step_00000004"]
    assert before not in {path.name for path in (storage / "a").iterdir()}


def made(folder: Path) -> Path:
    """A folder that looks like a checkpoint to the uploads, of the step in its name."""
    text = json.dumps({"step": int(folder.name[5:13]) if folder.name[5:13].isdecimal() else 0})
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(text)
    (folder / SUMS).write_text(f"{sha256(text.encode()).hexdigest()}  checkpoint.json\n")
    return folder


def test_the_launch_that_started_last_writes(tmp_path: Path, storage: Path) -> None:
    told: list[str] = []
    place = RemoteFolder(f"file://{storage}", "a")
    first, second = (Uploads(place, tmp_path, 1, told.append) for _ in range(2))
    first.take_over()
    second.take_over()
    second.add(made(tmp_path / "step_00000002"))
    assert second.close() is None and steps(storage) == ["step_00000002"]
    first.add(made(tmp_path / "step_00000004"))
    problem = first.close()
    assert problem is not None and f"another launch ({second.launch})" in problem and len(told) == 1
    assert place.read_name("latest") == f"step_00000002-{second.launch}"
    # What the first has left incomplete goes with the next checkpoint.
    assert len(steps(storage)) == 2
    second.add(made(tmp_path / "step_00000006"))
    assert second.close() is None and steps(storage) == ["step_00000006"]


def test_nothing_is_written_before_the_launch_is_the_only_one(tmp_path: Path, storage: Path) -> None:
    """A launch that is refused because another one runs has changed nothing in the storage."""
    place = RemoteFolder(f"file://{storage}", "a")
    running = Uploads(place, tmp_path, 1, print)
    running.take_over()
    running.add(made(tmp_path / "step_00000002"))
    assert running.close() is None
    before = {path: path.read_bytes() for path in storage.rglob("*") if path.is_file()}
    for overwrite in (False, True):
        config = tiny(
            "name=a", f"output={tmp_path}", f"checkpoint.remote=file://{storage}", f"overwrite={overwrite}"
        )
        refused = open_uploads(config, print, continues=not overwrite)
        assert refused is not None
        refused.add(made(tmp_path / f"step_0000000{4 + overwrite}"))
        assert refused.close() is None and refused.are_done
        assert {path: path.read_bytes() for path in storage.rglob("*") if path.is_file()} == before
    assert refused is not None
    refused.begin()
    assert refused.close() is None and steps(storage) == ["step_00000005"]


def test_only_what_a_run_named_is_deleted(tmp_path: Path, storage: Path) -> None:
    kept = [made(storage / "a" / name) for name in ("step_00000001-4f2a91c0_best", "step_notes")]
    left = storage / "a/step_00000001-4f2a91c0"  # of a launch that was killed
    made(left)
    (left / SUMS).unlink()
    uploads = Uploads(RemoteFolder(f"file://{storage}", "a"), tmp_path, 1, print)
    uploads.take_over()
    uploads.add(made(tmp_path / "step_00000002"))
    assert uploads.close() is None
    assert all(path.is_dir() for path in kept) and not (left / "checkpoint.json").exists()


def test_a_renamed_checkpoint_is_uploaded_by_its_step(tmp_path: Path, storage: Path) -> None:
    """Under its own name no other machine would find it."""
    place = RemoteFolder(f"file://{storage}", "a")
    uploads = Uploads(place, tmp_path, 1, print)
    uploads.take_over()
    uploads.add(made(tmp_path / "step_00000300_best"))
    assert uploads.close() is None
    assert place.complete() == [f"step_00000300-{uploads.launch}"] == [place.read_name("latest")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("any other")])
def test_output_that_cannot_be_written_does_not_end_the_uploads(
    error: Exception, tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an error that is not expected the thread dies; the run still ends, with a problem."""

    def say(line: str) -> None:
        raise error

    uploads = Uploads(RemoteFolder(f"file://{storage}", "a"), tmp_path, 5, say)
    uploads.take_over()
    broken = tmp_path / "step_00000002"
    broken.mkdir()  # without SHA256SUMS
    uploads.add(broken)
    closes = threading.Thread(target=uploads.close, daemon=True)
    closes.start()
    closes.join(20)
    assert not closes.is_alive() and uploads.are_done and not uploads.needs(broken)
    problem = uploads.close()
    assert problem is not None and "step_00000002 is not in file://" in problem
    uploads.add(made(tmp_path / "step_00000004"))
    assert uploads.close() is None and steps(storage) == ["step_00000004"]


def test_of_those_that_wait_the_newest_is_uploaded(tmp_path: Path, storage: Path, monkeypatch: Any) -> None:
    place, told = RemoteFolder(f"file://{storage}", "a"), list[str]()
    uploads = Uploads(place, tmp_path, 5, told.append)
    uploads.take_over()
    paths = [made(tmp_path / f"step_0000000{step}") for step in range(4)]
    began, go_on, upload = threading.Event(), threading.Event(), Uploads._upload

    def slow(uploads: Uploads, checkpoint: Path) -> None:
        began.set()
        assert go_on.wait(30)
        upload(uploads, checkpoint)

    monkeypatch.setattr(Uploads, "_upload", slow)
    uploads.add(paths[0])
    assert began.wait(30)
    for path in paths[1:]:
        uploads.add(path)
    assert [uploads.needs(path) for path in paths] == [True, False, False, True]
    go_on.set()
    assert uploads.close() is None and not told
    assert steps(storage) == [paths[0].name, paths[3].name]
    assert not any(map(uploads.needs, paths))


def test_a_failed_upload_is_one_line_and_training_goes_on(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    put, calls = RemoteFolder.put, list[str]()

    def fails(self: RemoteFolder, local: Path, *names: str) -> None:
        calls.append(names[0])
        if names[0].startswith("step_00000002"):
            raise RemoteError("the bucket is full: https://user:word@host")
        put(self, local, *names)

    monkeypatch.setattr(RemoteFolder, "put", fails)
    run(tmp_path / "first", storage)
    told = capfd.readouterr().out
    assert told.count("is not in file://") == 1 and "user:word" not in told
    assert steps(storage) == ["step_00000004"]
    # The last one counts: without it the run ends with the line, and its checkpoint stays on the disk.
    monkeypatch.setattr(RemoteFolder, "put", lambda *unused: fails(unused[0], unused[1], "step_00000002"))
    with pytest.raises(UserError, match="step_00000004 is not in file://"):
        run(tmp_path / "second", storage, "overwrite=true")
    assert (tmp_path / "second/a/checkpoints/step_00000004" / SUMS).is_file()


def test_after_a_failed_file_the_others_are_not_tried(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has a file of each rank, and a request to a storage that is away takes a minute."""
    place, tried = RemoteFolder(f"file://{storage}", "a"), list[str]()
    uploads = Uploads(place, tmp_path, 1, print)
    uploads.take_over()
    checkpoint = made(tmp_path / "step_00000002")
    names = ["checkpoint.json", *(f"rank_{number:05d}.safetensors" for number in range(200))]
    (checkpoint / SUMS).write_text("".join(f"{'0' * 64}  {name}\n" for name in names))

    def fails(self: RemoteFolder, local: Path, *parts: str) -> None:
        tried.append(parts[-1])
        time.sleep(0.01)
        raise RemoteError("away")

    monkeypatch.setattr(RemoteFolder, "put", fails)
    uploads.add(checkpoint)
    problem = uploads.close()
    assert problem is not None and problem.endswith("away") and len(tried) < 100


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/runs", "expected a URL such as s3://bucket/folder"),
        ("s3://", "expected a URL"),
        ("s3://AKIAKEY:secret@bucket/runs", "has credentials in it"),
        ("s3://bucket/runs?sig=secret", "has credentials in it"),
        ("s3://bucket/runs?versionId=secret", "has credentials in it"),
        ("nowhere://bucket/runs", "does not know nowhere://"),
    ],
)
def test_a_wrong_url_is_one_line_without_secrets(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        object_storage.check_folder(remote.KEY, url)
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
