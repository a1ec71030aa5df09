"""Who talks to whom: graphs on the workers, and their mixing matrices."""
