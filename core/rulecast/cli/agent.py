"""`rulecast agent`, with a central server or on its own."""

import asyncio
from collections.abc import Sequence

from rulecast.errors import UsageError
from rulecast_agent import app
from rulecast_agent.settings import AgentSettings, build_parser, settings_of
from rulecast_server.settings import SourceSettings, add_source_flags, source_settings


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Raises UsageError for bad input."""
    parser = build_parser()
    add_source_flags(parser)
    flags = parser.parse_args(argv)
    settings = settings_of(flags)
    source = source_settings(flags)
    if not settings.standalone and (source.kubeconfig or source.manifests):
        raise UsageError("--kubeconfig and --manifests are for --standalone; the server watches otherwise")
    # The stdlib loop: netlink and subprocesses, no fan-out.
    return asyncio.run(_standalone(settings, source) if settings.standalone else _remote(settings))


def _version() -> str:
    from rulecast.cli import version_text

    return f"rulecast {version_text()}"


async def _remote(settings: AgentSettings) -> int:
    return await app.serve(settings, app.remote_feed(settings, version=_version()))


async def _standalone(settings: AgentSettings, source_flags: SourceSettings) -> int:
    from rulecast_agent.feed.local import LocalFeed
    from rulecast_server.feed import DeltaLog, LocalSession
    from rulecast_server.kube.open import open_source
    from rulecast_server.pipeline import Pipeline, changed_versions, versions

    source = await open_source(source_flags)
    session = app.agent_session(settings, version=_version())
    feed = LocalFeed(session)
    local = LocalSession(DeltaLog(), feed.deliver)
    feed.connect(local.receive)
    pipeline = Pipeline(
        publish=local.publish,
        versions=lambda: versions(source),
        changed=lambda: changed_versions(source),
    )

    async def watch() -> None:
        try:
            await source.run(pipeline)
        finally:
            await source.close()

    async def mark() -> None:
        while True:
            await asyncio.sleep(10)
            local.pump(idle=True)

    return await app.serve(settings, app.kept_on_disk(settings, feed, session), beside=(watch, mark))
