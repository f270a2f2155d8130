"""The source that the flags ask for."""

from typing import NamedTuple

from rulecast_server.kube.reviews import Reviews
from rulecast_server.kube.status import Source
from rulecast_server.settings import SourceSettings


class Opened(NamedTuple):
    """A source, and who can tell what a token is worth where there is an API server to ask."""

    source: Source
    reviews: Reviews | None


async def open_source(settings: SourceSettings) -> Source:
    """Make the source ready to run; no request is made yet.

    Raises UsageError (ConfigError, ManifestError) with one clear line.
    """
    return (await open_with_reviews(settings)).source


async def open_with_reviews(settings: SourceSettings) -> Opened:
    """The same, and reviews through the source's own client: it closes both.

    Raises UsageError.
    """
    if settings.manifests is not None:
        from rulecast_server.kube.manifests import ManifestSource

        source = ManifestSource(settings.manifests)
        source.load()
        return Opened(source, None)
    # kubernetes_asyncio brings 768 model classes: 70 MB and 0.8 s that manifests should not cost.
    from rulecast_server.kube.auth import in_cluster_loader, kubeconfig_loader
    from rulecast_server.kube.client import ApiClient
    from rulecast_server.kube.cluster import ClusterSource
    from rulecast_server.kube.listwatch import WatchSettings

    loader = kubeconfig_loader(settings.kubeconfig) if settings.kubeconfig else in_cluster_loader()
    client = await ApiClient.connect(loader)
    source_settings = WatchSettings(inactivity=settings.watch_timeout)
    return Opened(ClusterSource(client, settings=source_settings), Reviews(client))
