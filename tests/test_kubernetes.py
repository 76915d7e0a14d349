"""The manifests of examples/kubernetes against the schemas of their APIs, and both containers' steps.

tests/support/kubernetes_schemas.json has the schemas of TrainJob (Kubeflow Trainer 2.3) and JobSet
(v1alpha2), made of the models of the package kubeflow-trainer-api 2.3.0, without descriptions. An unknown
field is an error here, as with kubectl's strict validation.
"""

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tiny import ROOT

FOLDER = ROOT / "examples/kubernetes"
CONTAINERS = ROOT / "examples/containers"
KINDS = {"trainjob": "TrainerV1alpha1TrainJob", "jobset": "JobsetV1alpha2JobSet"}
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


@cache
def schemas() -> dict[str, Any]:
    path = ROOT / "tests/support/kubernetes_schemas.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def problems(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return what does not fit the schema: types, missing and unknown fields."""
    if "$ref" in schema:
        return problems(value, schemas()[schema["$ref"].rpartition("/")[2]], place)
    if "anyOf" in schema:
        found = [problems(value, each, place) for each in schema["anyOf"]]
        return [] if [] in found else found[0]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        return [f"{place}: {value!r} is no {kind}"]
    if isinstance(value, list):
        items = schema.get("items", {})
        return [line for n, each in enumerate(value) for line in problems(each, items, f"{place}[{n}]")]
    if not isinstance(value, dict):
        return []
    known, other = schema.get("properties", {}), schema.get("additionalProperties")
    found_lines = [f"{place}.{name}: missing" for name in schema.get("required", []) if name not in value]
    for name, each in value.items():
        if name not in known and not isinstance(other, dict) and known:
            found_lines.append(f"{place}.{name}: unknown")
        else:
            found_lines += problems(each, known.get(name, other or {}), f"{place}.{name}")
    return found_lines


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_fits_the_schema(name: str) -> None:
    assert problems(manifest(name), schemas()[KINDS[name]]) == []


def test_the_schemas_find_mistakes() -> None:
    schema = schemas()[KINDS["trainjob"]]
    for keys, value, expected in (
        (("spec", "trainer", "numNodes"), "two", ".spec.trainer.numNodes: 'two' is no integer"),
        (("spec", "trainer", "nodes"), 2, ".spec.trainer.nodes: unknown"),
        (("spec", "runtimeRef"), {}, ".spec.runtimeRef.name: missing"),
        (("spec", "trainer", "env"), [{"value": "a"}], ".spec.trainer.env[0].name: missing"),
    ):
        wrong = copy.deepcopy(manifest("trainjob"))
        node = wrong
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
        assert expected in problems(wrong, schema)


def test_the_jobset_starts_its_nodes_at_the_first_pod() -> None:
    """JobSet names pods SET-JOB-REPLICA-INDEX, and their domain after the set."""
    jobset = manifest("jobset")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    name = jobset["metadata"]["name"]
    assert f"--master-addr={name}-{job['name']}-0-0.{name}" in container["args"]
    assert spec["parallelism"] == spec["completions"] == 2 and "--nnodes=2" in container["args"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in container["args"]
    trainer = manifest("trainjob")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == gpus
    claims = {manifest("volume")["metadata"]["name"]}
    for text in (FOLDER / f"{kind}.yaml" for kind in KINDS):
        assert set(re.findall(r"claimName: (\S+)", text.read_text(encoding="utf-8"))) == claims


def test_torchrun_gives_the_ranks_almost_the_whole_time_after_sigterm() -> None:
    """Its default is 30 s, after which it kills ranks that still save."""
    (job,) = manifest("jobset")["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    trainjob = manifest("trainjob")["spec"]
    (patch,) = trainjob["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    for arguments, spec in (
        (pod["containers"][0]["args"], pod),
        (trainjob["trainer"]["command"], patch["template"]["spec"]["template"]["spec"]),
    ):
        (timeout,) = [it for it in arguments if it.startswith("--shutdown-timeout=")]
        assert 300 <= int(timeout.partition("=")[2]) < spec["terminationGracePeriodSeconds"] == 600


def test_both_containers_take_the_steps_of_setup() -> None:
    docker = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    apptainer = (CONTAINERS / "apptainer.def").read_text(encoding="utf-8")
    steps = re.findall(r"^RUN (.*)$", docker, flags=re.MULTILINE)
    post = apptainer.partition("%post\n")[2].partition("\n\n")[0]
    assert steps == [line.strip() for line in post.splitlines() if "export" not in line]
    assert steps[-1] == "make -C /opt/megamoe setup"
    for name, pattern in (("BASE", r"BASE=(ubuntu\S+)$"), ("TORCH_INDEX", r"TORCH_INDEX=(https\S+)$")):
        found = [re.findall(pattern, text, flags=re.MULTILINE) for text in (docker, apptainer)]
        assert found[0] == found[1] and len(found[0]) == 1, name
    assert all("Unbuilt: there was no" in text for text in (docker, apptainer))
    ignored = Path(ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "data", "runs"} <= set(ignored)
