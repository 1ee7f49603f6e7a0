SELECT pg_catalog.pg_stat_activity.pid, pg_catalog.pg_stat_activity.usename, pg_catalog.pg_stat_activity.application_name, pg_catalog.pg_stat_activity.xact_start IS NOT NULL AS seen
FROM task JOIN pg_catalog.pg_stat_activity ON CAST(pg_catalog.pg_stat_activity.backend_xid AS TEXT) = CAST(task.xmax AS TEXT)
WHERE task.task_id = %(task_id)s::BIGINT
