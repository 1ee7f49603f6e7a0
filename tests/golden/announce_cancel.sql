SELECT pg_notify(concat('pgtask_', CAST(to_regclass(quote_ident(%(quote_ident_1)s)) AS OID)), concat('cancel ', %(task_id)s::BIGINT)) AS pg_notify_1
