DELETE
FROM task_worker
WHERE task_worker.worker_id = %(worker_id)s::INTEGER
