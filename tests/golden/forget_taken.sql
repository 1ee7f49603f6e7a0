DELETE
FROM task_worker
WHERE task_worker.lane < 0 AND task_worker.task_ids = %(task_ids)s::BIGINT[] AND task_worker.row_versions = %(row_versions)s::BIGINT[]
