"""Keys and values from one worker to another: a prefill worker computes a prompt, a decode worker goes on with it.

How a request runs where both kinds live: the gateway chooses the decode worker as ever, and a prefill worker. It sends
both the request at once: the prefill worker computes the prompt's full blocks and holds them under a ticket
(``Generate.lend``), the decode worker fetches them with the ticket (``Generate.source``) and then runs the request, as
if its prefix cache had had them all along.

Rules
- Whatever goes wrong (no answer in time, a broken stream, blocks of another kind, keys of another prompt, no room), the
  decode worker computes what is missing. Nothing of a transfer can end a request or change a token.
- A block is taken for what its chain key says, and the decode worker computes that key itself from the request: scope,
  model revision, adapter and every token before are in it. What came under another key is refused.
- A ticket is 128 random bits from the gateway, good for one reader and until its lease ends. It opens these blocks and
  nothing else; the worker's secret stays between it and its gateway.
- A lease holds blocks in use: nobody gets them until the reader is done, is gone, or is too late. A purge ends leases
  and transfers of what it concerns first.
- Bytes cross through one interface, ``connector.Connector``. ``stream.py`` is host memory and gRPC; a faster one
  (shared memory, RDMA) takes its place without the rest noticing.
"""
