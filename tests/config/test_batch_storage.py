"""The configuration checks where files of batches may be, and never shows a URL's password."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.config import parse_settings
from serve_app.config.batch_urls import masked
from serve_app.errors import ConfigError

MODELS = {"models": {"a": {"model": "/m"}}}
SECRET = "hunter2"
ONE = "give dir for one ingress; or files and one of database and database_file for several"
SHARED = {"database": "postgresql://batches@db:5432/batches", "files": "s3://bucket/batches?region=eu-central-1"}


def refusal(batch: dict[str, Any], *, max_ingresses: int = 1) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_settings({**MODELS, "ingress": {"batch": batch, "replicas": {"max": max_ingresses}}})
    return str(refused.value)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({}, f"ingress.batch: names no storage; {ONE}"),
        ({"files": "s3://b/p"}, f"ingress.batch: names files; {ONE}"),
        ({"dir": "/b", **SHARED}, f"ingress.batch: names database, dir, files; {ONE}"),
        (
            {**SHARED, "database": f"mysql://batches:{SECRET}@db/batches"},
            "ingress.batch.database: is 'mysql://batches:***@db/batches', not a URL of PostgreSQL; write postgresql://USER@HOST:5432/DATABASE",
        ),
        (
            {**SHARED, "database": f"batches:{SECRET}@db/batches"},
            "ingress.batch.database: is 'batches:***@db/batches', not a URL of PostgreSQL; write postgresql://USER@HOST:5432/DATABASE",
        ),
        (
            {**SHARED, "database": "postgresql://batches@db"},
            "ingress.batch.database: is 'postgresql://batches@db', which names no database; write postgresql://USER@HOST:5432/DATABASE",
        ),
        (
            {**SHARED, "database": f"postgresql://batches:{SECRET}@db/batches"},
            "ingress.batch.database: is 'postgresql://batches:***@db/batches', with a password, which Ray's dashboard would show; "
            "set PGPASSWORD in the environment of the ingress, or write the URL into a file and name it in database_file",
        ),
        (
            {**SHARED, "files": f"s3://key:{SECRET}@bucket/p"},
            "ingress.batch.files: is 's3://key:***@bucket/p', with a credential, which Ray's dashboard would show; "
            "give the ingress an identity, such as IRSA on EKS, or the variables of the environment that its client reads",
        ),
        (
            {**SHARED, "files": "/shared"},
            "ingress.batch.files: is '/shared', not a place that ingresses can share; "
            "write s3://BUCKET/PREFIX?region=REGION, gs://BUCKET/PREFIX or file:///FOLDER",
        ),
        (
            {**SHARED, "files": "file://shared/batches"},
            "ingress.batch.files: is 'file://shared/batches', not a place that ingresses can share; "
            "write s3://BUCKET/PREFIX?region=REGION, gs://BUCKET/PREFIX or file:///FOLDER",
        ),
        (
            {**SHARED, "files": "file:///"},
            "ingress.batch.files: is 'file:///', not a place that ingresses can share; "
            "write s3://BUCKET/PREFIX?region=REGION, gs://BUCKET/PREFIX or file:///FOLDER",
        ),
        (
            {**SHARED, "files": "s3://bucket/?region=eu-central-1"},
            "ingress.batch.files: is 's3://bucket/?region=eu-central-1', a whole bucket, in which files that the database does not "
            "know would be removed; add a prefix that only this database uses, such as s3://bucket/batches",
        ),
        (
            {**SHARED, "files": "gs://bucket/p?regoin=eu"},
            "ingress.batch.files: is 'gs://bucket/p?regoin=eu', with the unknown option 'regoin'; "
            "known for gs: scheme, endpoint_override, project_id, retry_limit_seconds",
        ),
    ],
)
def test_wrong_storage_is_refused_with_the_way_out(batch: dict[str, Any], said: str) -> None:
    assert refusal(batch) == said


def test_a_folder_serves_one_ingress_and_shared_storage_several() -> None:
    assert refusal({"dir": "/b"}, max_ingresses=3) == (
        "ingress.batch.dir: is '/b', and replicas.max is 3: each ingress would know only its own files; "
        "set batch.database and batch.files, which ingresses share, in place of batch.dir, or set replicas.max: 1"
    )
    settings = parse_settings({**MODELS, "ingress": {"batch": SHARED, "replicas": {"max": 3}}})
    assert settings.ingress.batch is not None
    assert settings.ingress.batch.database_url() == SHARED["database"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://u:{SECRET}@h:5432/db", "postgresql://u:***@h:5432/db"),
        (f"postgresql://u:{SECRET}/a@b@h/db", "postgresql://u:***@h/db"),
        (f"postgresql://u@h/db?password={SECRET}&sslmode=require", "postgresql://u@h/db?password=***&sslmode=require"),
        (f"host=h password = '{SECRET} x' dbname=db", "host=h password=*** dbname=db"),
        (f"postgresql://u:{SECRET}\n@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h:5432/db", "postgresql://u@h:5432/db"),
        ("s3://bucket/prefix?region=eu-central-1", "s3://bucket/prefix?region=eu-central-1"),
        ("file:///folder", "file:///folder"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_the_file_of_the_url_may_have_a_password_and_its_errors_show_none(tmp_path: Path) -> None:
    path = tmp_path / "url"
    given = {"database_file": str(path), "files": SHARED["files"]}
    batch = parse_settings({**MODELS, "ingress": {"batch": given}}).ingress.batch
    assert batch is not None
    with pytest.raises(
        ConfigError, match=r"^ingress\.batch\.database_file: .*url cannot be read: No such file or directory; mount"
    ):
        batch.database_url()
    path.write_text(f"mysql://u:{SECRET}@h/db\n")
    with pytest.raises(ConfigError, match=r"holds 'mysql://u:\*\*\*@h/db', not a URL of PostgreSQL; write postgresql://"):
        batch.database_url()
    path.write_text(f"postgresql://u:{SECRET}%ss@h/db\n")
    with pytest.raises(
        ConfigError, match=r"holds 'postgresql://u:\*\*\*@h/db', which has a % that is not .* write %25 for a %; write"
    ):
        batch.database_url()
    path.write_text(f"postgresql://u:{SECRET}@h/db\n")
    assert batch.database_url() == f"postgresql://u:{SECRET}@h/db"
    assert SECRET not in repr(batch)
