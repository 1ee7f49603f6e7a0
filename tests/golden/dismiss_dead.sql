DELETE
FROM task_worker
WHERE task_worker.worker_id != %(worker_id)s::INTEGER AND (NOT (EXISTS (SELECT 1
FROM unnest(task_worker.task_ids, task_worker.row_versions) AS held(task_id, version)
WHERE EXISTS (SELECT 1
FROM task
WHERE task.task_id = held.task_id AND CAST(CAST(task.xmin AS TEXT) AS BIGINT) = held.version))) OR task_worker.server_started_at != pg_postmaster_start_time()) AND (task_worker.is_direct AND task_worker.lane >= 0 OR task_worker.seen_at < statement_timestamp() - interval '60 seconds') AND task_worker.worker_id != %(worker_id)s::INTEGER AND (task_worker.is_direct AND pg_try_advisory_xact_lock_shared(1885828204, task_worker.worker_id) OR NOT task_worker.is_direct)
