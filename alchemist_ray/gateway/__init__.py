"""The endpoint for thin clients: processes that have neither Ray nor MPI."""
