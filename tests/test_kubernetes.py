"""The manifest of examples/kubernetes: it fits the schemas of Kubernetes, and itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SERVICE, JOB = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "training.yaml").read_text())
POD: dict[str, Any] = JOB["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]


@pytest.mark.parametrize("part", [SERVICE, JOB], ids=["service", "job"])
def test_it_fits_the_schemas(part: dict[str, Any]) -> None:
    kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)


def test_its_names_and_numbers_fit_each_other() -> None:
    name = JOB["metadata"]["name"]
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"].items() <= JOB["spec"]["template"]["metadata"]["labels"].items()
    fixed = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}
    [rank] = [entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in CONTAINER["env"] if "valueFrom" in entry]
    assert (fixed["RANK"], rank) == (None, "metadata.annotations['batch.kubernetes.io/job-completion-index']")
    assert fixed["MASTER_ADDR"] == f"{name}-0.{POD['subdomain']}"
    pods = JOB["spec"]["completions"]
    assert JOB["spec"]["parallelism"] == pods == int(fixed["WORLD_SIZE"])
    assert CONTAINER["command"][CONTAINER["command"].index("--num-workers") + 1] == str(pods)
    mounts, volumes = ({entry["name"] for entry in part} for part in (CONTAINER["volumeMounts"], POD["volumes"]))
    assert mounts == volumes
    assert (ROOT / CONTAINER["command"][1]).exists()
