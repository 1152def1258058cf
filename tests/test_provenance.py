"""`make dist` writes where the files of a release come from, in the form of in-toto's and SLSA's specifications."""

from tools.provenance import statement

DIGESTS = {"b.whl": "bb", "a.tgz": "aa"}
ON_GITHUB = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "owner/serve-app",
    "GITHUB_REF": "refs/tags/v0.2.0",
    "GITHUB_WORKFLOW_REF": "owner/serve-app/.github/workflows/release.yml@refs/tags/v0.2.0",
    "GITHUB_RUN_ID": "7",
    "GITHUB_RUN_ATTEMPT": "2",
}


def test_a_statement_of_a_workflow_names_repository_workflow_and_run() -> None:
    made = statement(
        DIGESTS, target="dist", commit="c0ffee", changed=[], variables={"IMAGE_REPOSITORY": "r/i"}, environment=ON_GITHUB
    )
    assert made == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "a.tgz", "digest": {"sha256": "aa"}}, {"name": "b.whl", "digest": {"sha256": "bb"}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:serve-app:make:v1",
                "externalParameters": {"target": "dist", "variables": {"IMAGE_REPOSITORY": "r/i"}},
                "resolvedDependencies": [
                    {"uri": "git+https://github.com/owner/serve-app@refs/tags/v0.2.0", "digest": {"gitCommit": "c0ffee"}}
                ],
            },
            "runDetails": {
                "builder": {"id": "https://github.com/owner/serve-app/.github/workflows/release.yml@refs/tags/v0.2.0"},
                "metadata": {"invocationId": "https://github.com/owner/serve-app/actions/runs/7/attempts/2"},
            },
        },
    }


def test_a_statement_of_another_machine_names_no_builder_and_what_the_commit_lacks() -> None:
    made = statement(DIGESTS, target="dist", commit="c0ffee", changed=["Makefile"], variables={}, environment={})["predicate"]
    assert made["runDetails"] == {"builder": {"id": "urn:serve-app:unnamed-builder"}}
    source = {"digest": {"gitCommit": "c0ffee"}, "annotations": {"uncommitted": ["Makefile"]}}
    assert made["buildDefinition"]["resolvedDependencies"] == [source]
