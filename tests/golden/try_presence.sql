SELECT pg_try_advisory_lock(1885828204, %(worker_id)s::INTEGER) AS pg_try_advisory_lock_1
