"""The real kube-proxy as the judge: the same random objects and the same packets for it and for us."""
