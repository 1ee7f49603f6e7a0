SELECT count(DISTINCT task_worker.worker_id) AS count_1
FROM task_worker
WHERE task_worker.worker_id != %(worker_id)s::INTEGER
