SELECT pg_try_advisory_xact_lock(1885828204, -1) AS pg_try_advisory_xact_lock_1
