"""The real kube-proxy as the judge: the same random objects and the same packets for it and for us.

A scenario (`generate`) is a row of states of a cluster. Two labs with the same addresses (`twins`) follow one
apiserver stand-in: our server and agents in one, kube-proxy on each node of the other. After each state both
settle, and `judge` asks the same questions (`cases`) of both until they agree; flows that stay (`staying`)
and health-check node ports (`health`) are compared, too. What does not come to agree is a bug of one of them,
or known (`known`), with its reason in docs/differences.md.
"""
