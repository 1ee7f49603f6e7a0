SELECT pg_terminate_backend(holders.pid) AS pg_terminate_backend_1
FROM (SELECT pg_catalog.pg_locks.pid AS pid
FROM pg_catalog.pg_locks
WHERE pg_catalog.pg_locks.locktype = 'advisory' AND pg_catalog.pg_locks.database = (SELECT pg_catalog.pg_database.oid
FROM pg_catalog.pg_database
WHERE pg_catalog.pg_database.datname = current_database()) AND pg_catalog.pg_locks.classid = CAST(1885828204 AS OID) AND pg_catalog.pg_locks.objid = CAST(%(worker_id)s::INTEGER AS OID) AND pg_catalog.pg_locks.objsubid = 2 AND pg_catalog.pg_locks.granted) AS holders
