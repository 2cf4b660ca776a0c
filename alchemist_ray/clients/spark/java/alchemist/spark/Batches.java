package alchemist.spark;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.plans.QueryPlan;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.execution.ColumnarToRowExec;
import org.apache.spark.sql.execution.InputAdapter;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.WholeStageCodegenExec;
import org.apache.spark.sql.execution.columnar.CachedRDDBuilder;
import org.apache.spark.sql.execution.columnar.DefaultCachedBatchSerializer;
import org.apache.spark.sql.execution.columnar.InMemoryRelation;
import org.apache.spark.sql.execution.columnar.InMemoryTableScanExec;
import scala.collection.Iterator;
import scala.collection.Seq;

/**
 * The rows of a DataFrame that Spark has in columns, as in its cache, before it makes rows of them.
 */
public final class Batches {
    private final CachedRDDBuilder cache; // null: `plan` makes them
    private final SparkPlan plan;
    private final List<Integer> ordinals;

    private Batches(CachedRDDBuilder cache, SparkPlan plan, List<Integer> ordinals) {
        this.cache = cache;
        this.plan = plan;
        this.ordinals = ordinals;
    }

    public JavaRDD<?> rdd() {
        return cache != null ? cache.cachedColumnBuffers().toJavaRDD()
                : plan.executeColumnar().toJavaRDD();
    }

    /** The place of each column of the DataFrame in a batch, as JSON: py4j would ask for each. */
    public String ordinals() {
        return ordinals.toString();
    }

    /** Batches of Spark's cache, which {@link Stored} reads; null if the frame is not just that. */
    public static Batches stored(Dataset<Row> frame) {
        LogicalPlan plan = frame.queryExecution().withCachedData(); // Spark keeps it with the frame
        List<ExprId> columns = ids(plan);
        while (columns != null && plan instanceof Project) {
            columns = sources(columns, ((Project) plan).projectList());
            plan = ((Project) plan).child();
        }
        if (columns == null || !(plan instanceof InMemoryRelation)) {
            return null;
        }
        CachedRDDBuilder cache = ((InMemoryRelation) plan).cacheBuilder();
        List<Integer> ordinals = places(columns, plan);
        return cache.serializer().getClass() == DefaultCachedBatchSerializer.class
                && ordinals != null ? new Batches(cache, null, ordinals) : null;
    }

    /**
     * Batches that Spark makes of its cache or of files; null if it computes the rows, and does more
     * than to rename and to choose columns. Adaptive execution would hide the plan.
     */
    public static Batches of(Dataset<Row> fixed) {
        SparkPlan plan = fixed.queryExecution().executedPlan();
        List<ExprId> columns = ids(plan);
        while (!inColumns(plan)) {
            if (plan instanceof ProjectExec) {
                columns = sources(columns, ((ProjectExec) plan).projectList());
                if (columns == null) {
                    return null;
                }
            } else if (!(plan instanceof WholeStageCodegenExec || plan instanceof InputAdapter
                    || plan instanceof ColumnarToRowExec)) {
                return null;
            }
            plan = plan.children().head();
        }
        List<Integer> ordinals = places(columns, plan);
        return ordinals == null ? null : new Batches(null, plan, ordinals);
    }

    /** The places of columns in the output of a plan; null if one is not there. */
    private static List<Integer> places(List<ExprId> columns, QueryPlan<?> plan) {
        Map<ExprId, Integer> places = new HashMap<>();
        List<ExprId> there = ids(plan);
        for (int k = 0; k < there.size(); k++) {
            places.put(there.get(k), k);
        }
        List<Integer> ordinals = new ArrayList<>();
        for (ExprId column : columns) {
            if (!places.containsKey(column)) {
                return null;
            }
            ordinals.add(places.get(column));
        }
        return ordinals;
    }

    /** Spark makes rows of a wide cache, but has it in columns too. */
    private static boolean inColumns(SparkPlan plan) {
        if (plan instanceof InMemoryTableScanExec) {
            InMemoryRelation cache = ((InMemoryTableScanExec) plan).relation();
            return cache.cacheBuilder().serializer().supportsColumnarOutput(cache.schema());
        }
        return plan.supportsColumnar();
    }

    private static List<ExprId> ids(QueryPlan<?> plan) {
        List<ExprId> found = new ArrayList<>();
        for (Iterator<Attribute> some = plan.output().iterator(); some.hasNext();) {
            found.add(some.next().exprId());
        }
        return found;
    }

    /** The columns of which a projection makes these; null if it computes. */
    private static List<ExprId> sources(List<ExprId> columns, Seq<NamedExpression> projected) {
        Map<ExprId, Expression> sources = new HashMap<>();
        for (Iterator<NamedExpression> some = projected.iterator(); some.hasNext();) {
            NamedExpression named = some.next();
            sources.put(
                    named.exprId(),
                    named instanceof Alias ? ((Alias) named).child() : (Expression) named);
        }
        List<ExprId> found = new ArrayList<>();
        for (ExprId column : columns) {
            Expression source = sources.get(column);
            if (!(source instanceof Attribute)) {
                return null;
            }
            found.add(((Attribute) source).exprId());
        }
        return found;
    }
}
