"""The source that the flags ask for."""

from rulecast_server.kube.auth import in_cluster_loader, kubeconfig_loader
from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.cluster import ClusterSource
from rulecast_server.kube.listwatch import WatchSettings
from rulecast_server.kube.manifests import ManifestSource
from rulecast_server.settings import SourceSettings


async def open_source(settings: SourceSettings) -> ClusterSource | ManifestSource:
    """Make the source ready to run; no request is made yet.

    Raises UsageError (ConfigError, ManifestError) with one clear line.
    """
    if settings.manifests is not None:
        source = ManifestSource(settings.manifests)
        source.load()
        return source
    loader = kubeconfig_loader(settings.kubeconfig) if settings.kubeconfig else in_cluster_loader()
    client = await ApiClient.connect(loader)
    return ClusterSource(client, settings=WatchSettings(inactivity=settings.watch_timeout))
