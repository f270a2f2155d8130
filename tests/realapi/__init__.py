"""The real apiserver and etcd as the source: `KUBE_APISERVER=BINARY ETCD=BINARY pytest tests/realapi`."""
