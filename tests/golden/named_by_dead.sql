SELECT unnest(task_worker.task_ids) AS unnest_1
FROM task_worker
WHERE task_worker.worker_id != %(worker_id)s::INTEGER AND cardinality(task_worker.task_ids) > %(cardinality_1)s::INTEGER AND task_worker.server_started_at = pg_postmaster_start_time() AND task_worker.is_direct AND task_worker.worker_id != %(worker_id)s::INTEGER AND (task_worker.is_direct AND pg_try_advisory_xact_lock_shared(1885828204, task_worker.worker_id) OR NOT task_worker.is_direct)
