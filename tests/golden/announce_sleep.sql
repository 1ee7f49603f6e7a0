SELECT pg_try_advisory_lock_shared(%(pg_try_advisory_lock_shared_2)s::INTEGER, CAST(CAST(%(oid)s::BIGINT AS OID) AS INTEGER)) AS pg_try_advisory_lock_shared_1
