SELECT pg_terminate_backend(pg_stat_activity.pid) AS pg_terminate_backend_1
FROM pg_stat_activity
WHERE pg_stat_activity.pid = %(pid)s::INTEGER AND pg_stat_activity.xact_start = CAST(%(begun)s::VARCHAR AS TIMESTAMP WITH TIME ZONE)
