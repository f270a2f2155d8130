"""Where the API server is and who we are: kubeconfig or the pod's service account.

kubernetes_asyncio reads the configuration and runs exec plugins; nothing else of it is used. Its loaders read
each file once, cache a pod's token for a minute and keep a token file's trailing newline, so here a load is
always a fresh one, and `Access.due` tells when the next one should be.
"""

import os
import ssl
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import incluster_config, kube_config

from rulecast.errors import UsageError

FileState = tuple[str, int, int, int]
"""Path, mtime in ns, size, inode; zeros when the file is missing."""


class ConfigError(UsageError):
    """The kubeconfig or the service account cannot be used; one line that names the file and the reason."""


class TlsFiles(NamedTuple):
    """What a TLS context is made of. Equal values need no new connections."""

    ca: FileState | None
    cert: FileState | None
    key: FileState | None
    verify: bool

    def context(self) -> ssl.SSLContext:
        """Build the context. Raises ConfigError."""
        try:
            context = ssl.create_default_context(cafile=self.ca[0] if self.ca else None)
            if self.cert:
                context.load_cert_chain(self.cert[0], self.key[0] if self.key else None)
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(file[0] for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"TLS files of the API server ({names}): {_one_line(error)}") from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the configuration."""

    host: str
    """URL without a trailing slash."""
    authorization: str | None
    """Value of the header; a secret, never logged."""
    tls: TlsFiles
    server_name: str | None
    proxy: str | None
    files: tuple[FileState, ...]
    """All that was read, as it was."""
    expires: float | None
    """Unix seconds after which an exec plugin must run again."""

    def __repr__(self) -> str:
        return f"Access({self.host})"

    def due(self, now: float) -> bool:
        """Whether a file has changed or the credential ran out; reads the file system."""
        if self.expires is not None and now >= self.expires:
            return True
        return self.files != _states(file[0] for file in self.files)


Load = Callable[[], Awaitable[Access]]


def kubeconfig_loader(path: Path, context: str | None = None) -> Load:
    """Load from a kubeconfig file; `context` None is its current one. The loader raises ConfigError."""

    async def load() -> Access:
        token_files = _check_kubeconfig(path)
        # Taken before reading, so that a change in between is noticed.
        own = _states([str(path), *token_files])
        configuration = _blank()
        try:
            loader = await kube_config.load_kube_config(
                config_file=str(path),
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
        # Whatever a strange file provokes: KeyError, TypeError, binascii.Error, ConfigException.
        except AssertionError:
            raise ConfigError(f"{path}: an empty server, user or context section") from None
        except TypeError:
            # kubernetes_asyncio looks for certificates in a user of None.
            raise ConfigError(f"{path}: the context has no user ('user: {{}}' is anonymous)") from None
        except FileNotFoundError as error:
            # uvloop does not say which program was not found.
            raise ConfigError(f"{path}: {error.filename or 'its exec plugin'}: {error.strerror}") from None
        except Exception as error:
            raise ConfigError(f"{path}: {_one_line(error)}") from None
        expiry = getattr(loader, "exec_plugin_expiry", None)
        if isinstance(expiry, datetime):
            expires = (expiry if expiry.tzinfo else expiry.replace(tzinfo=UTC)).timestamp()
        else:
            expires = None
        return _access(configuration, own, expires, str(path))

    return load


def in_cluster_loader(
    token: str = incluster_config.SERVICE_TOKEN_FILENAME, ca: str = incluster_config.SERVICE_CERT_FILENAME
) -> Load:
    """Load the service account of the pod that this runs in. The loader raises ConfigError."""

    async def load() -> Access:
        own = _states([token, ca])
        configuration = _blank()
        try:
            incluster_config.load_incluster_config(  # type: ignore[no-untyped-call]
                configuration, try_refresh_token=False, token_filename=token, cert_filename=ca
            )
        except Exception as error:
            raise ConfigError(
                f"not in a cluster, and neither --kubeconfig nor --manifests given: {_one_line(error)}"
            ) from None
        return _access(configuration, own, None, "service account")

    return load


def _blank() -> Configuration:
    # Not through `Configuration.get_default_copy`: the process-wide default is nobody's here.
    configuration: Configuration = type.__call__(Configuration)
    return configuration


def _access(
    configuration: Configuration, own: tuple[FileState, ...], expires: float | None, origin: str
) -> Access:
    host = str(configuration.host or "").rstrip("/")
    if not host.startswith(("http://", "https://")):
        raise ConfigError(f"{origin}: server {host!r} is no http:// or https:// URL")
    names = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    ca, cert, key = (_state(str(name)) if name else None for name in names)
    key_value = configuration.api_key.get("BearerToken")
    authorization = str(key_value).strip() if key_value else None
    if authorization is not None and not authorization.isprintable():
        raise ConfigError(f"{origin}: the token contains control characters")
    tls = TlsFiles(ca, cert, key, bool(configuration.verify_ssl))
    if host.startswith("https"):
        try:
            tls.context()
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
    return Access(
        host=host,
        authorization=authorization,
        tls=tls,
        server_name=configuration.tls_server_name or None,
        proxy=configuration.proxy or None,
        files=own + tuple(file for file in (ca, cert, key) if file is not None),
        expires=expires,
    )


def _check_kubeconfig(path: Path) -> list[str]:
    """Say early and clearly what kubernetes_asyncio would say with a traceback; return the token files."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        # Some problems are the second half of a sentence only.
        said = ", ".join(filter(None, (getattr(error, part, None) for part in ("context", "problem"))))
        raise ConfigError(f"{path}{line}: {said or 'not YAML'}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a kubeconfig (a mapping with clusters, contexts and users)")
    files = []
    for named in content.get("users") or ():
        user = named.get("user") if isinstance(named, dict) else None
        token_file = user.get("tokenFile") if isinstance(user, dict) else None
        if isinstance(token_file, str):
            files.append(str(path.parent.absolute() / token_file))
    return files


def _states(paths: Iterable[str]) -> tuple[FileState, ...]:
    return tuple(_state(path) for path in paths)


def _state(path: str) -> FileState:
    try:
        stat = os.stat(path)
    except OSError:
        return (path, 0, 0, 0)
    return (path, stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
