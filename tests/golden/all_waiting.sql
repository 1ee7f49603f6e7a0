SELECT task.task_id, CAST(task.task_type AS TEXT) AS task_type, task.params, task.created_at, task.run_at, task.attempts, task.last_error
FROM task
ORDER BY task.task_id
