SELECT pg_advisory_unlock_shared(%(pg_advisory_unlock_shared_2)s::INTEGER, CAST(CAST(%(oid)s::BIGINT AS OID) AS INTEGER)) AS pg_advisory_unlock_shared_1
