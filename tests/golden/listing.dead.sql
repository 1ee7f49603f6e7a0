SELECT dead_task.task_id, CAST(dead_task.task_type AS TEXT) AS task_type, CAST(dead_task.params AS TEXT) AS params, greatest('0001-01-02', least(dead_task.created_at, '9999-01-02')) AS created_at, dead_task.attempts, dead_task.last_error, dead_task.reason, greatest('0001-01-02', least(dead_task.buried_at, '9999-01-02')) AS buried_at
FROM dead_task
WHERE CAST(dead_task.task_type AS TEXT) = %(param_1)s::VARCHAR
ORDER BY dead_task.task_id
LIMIT %(param_2)s::INTEGER
