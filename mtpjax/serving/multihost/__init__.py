"""One server over several processes. Process 0 serves, and sends every call to the other processes, which also run it.

JAX's multi-controller model requires all processes of a mesh to run the same programs in the same order. Process 0 has
the HTTP server, the scheduler and the pages. Before it runs a call, its session sends the program's name, the key and
the arrays, which are small and on the host (`plan.py`). The other processes load the same model, receive the calls over
TCP connections (`connection.py`), and run them (`follower.py`). Reports are whole arrays in every process, and only
process 0 reads them.
"""
