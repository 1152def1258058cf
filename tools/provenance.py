"""This script writes the provenance of a folder of release files: which commit, command and builder they come from.

``python -m tools.provenance TARGET FOLDER FILE.json [NAME=VALUE ...]`` runs it for the targets dist and dist-images of the Makefile;
NAME=VALUE are the variables given to make.
The format is an in-toto statement (v1) with SLSA's provenance (v1) as predicate. The statement is as true as the signature of the
folder's SHA256SUMS, which covers it: the script itself signs nothing.
"""

import argparse
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Object = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("variables", nargs="*", metavar="NAME=VALUE")
    arguments = parser.parse_args()
    made = statement(
        {path.name: _sha256(path) for path in arguments.folder.iterdir()},
        target=arguments.target,
        commit=_git("rev-parse", "HEAD"),
        changed=[line[3:] for line in _git("status", "--porcelain").splitlines()],
        variables=dict(variable.split("=", 1) for variable in arguments.variables),
        environment=os.environ,
    )
    arguments.file.write_text(json.dumps(made, indent=2) + "\n")


def statement(
    digests: Mapping[str, str],
    *,
    target: str,
    commit: str,
    changed: Sequence[str],
    variables: Mapping[str, str],
    environment: Mapping[str, str],
) -> Object:
    """Return the statement.

    Args:
        digests: The SHA-256 of each file, in hex, by its name.
        target: The target of the Makefile that made the files.
        changed: Files of the working tree that differ from the commit.
        variables: Variables of make that change the files.
        environment: The variables with which GitHub tells a job its repository, workflow and run; without them the builder is unnamed.
    """
    source: Object = {"digest": {"gitCommit": commit}}
    builder, run = "urn:serve-app:unnamed-builder", {}
    if environment.get("GITHUB_ACTIONS") == "true":
        server, repository = environment["GITHUB_SERVER_URL"], environment["GITHUB_REPOSITORY"]
        source["uri"] = f"git+{server}/{repository}@{environment['GITHUB_REF']}"
        builder = f"{server}/{environment['GITHUB_WORKFLOW_REF']}"
        attempt = f"{environment['GITHUB_RUN_ID']}/attempts/{environment['GITHUB_RUN_ATTEMPT']}"
        run = {"metadata": {"invocationId": f"{server}/{repository}/actions/runs/{attempt}"}}
    if changed:
        source["annotations"] = {"uncommitted": list(changed)}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:serve-app:make:v1",
                "externalParameters": {"target": target, "variables": dict(variables)},
                "resolvedDependencies": [source],
            },
            "runDetails": {"builder": {"id": builder}, **run},
        },
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:  # an image has gigabytes
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.rstrip("\n")


if __name__ == "__main__":
    main()
