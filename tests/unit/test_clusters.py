"""The manifest for Kubernetes has what Kubeflow Trainer's schema asks for."""

from __future__ import annotations

import pytest

from tests.commands import ROOT


def test_the_manifest_of_a_job_fits_the_schema() -> None:
    yaml = pytest.importorskip("yaml")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api has the schema")
    text = (ROOT / "examples" / "clusters" / "trainjob.yaml").read_text()
    given = yaml.safe_load(text)
    job = models.TrainerV1alpha1TrainJob.model_validate(given)
    assert job.model_dump(by_alias=True, exclude_none=True, mode="json") == given  # no field is unknown
