SELECT CAST(CAST(to_regclass(quote_ident(%(quote_ident_1)s)) AS OID) AS BIGINT) AS to_regclass_1
