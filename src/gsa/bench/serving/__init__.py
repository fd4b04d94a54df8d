"""`gsa bench serve`: servers, asked by streaming clients over HTTP, beside the engine itself and beside others."""
