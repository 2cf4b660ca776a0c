package alchemist.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.execution.ColumnarToRowExec;
import org.apache.spark.sql.execution.InputAdapter;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.WholeStageCodegenExec;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import scala.collection.Seq;

/**
 * The rows of a DataFrame that Spark has in columns, as in its cache, before it makes rows of them.
 */
public final class Batches {
    private static final String MAX_FIELDS = "spark.sql.codegen.maxFields";

    private final SparkPlan plan;
    private final List<Integer> ordinals;

    private Batches(SparkPlan plan, List<Integer> ordinals) {
        this.plan = plan;
        this.ordinals = ordinals;
    }

    public JavaRDD<ColumnarBatch> rdd() {
        return plan.executeColumnar().toJavaRDD();
    }

    /** The place of each column of the DataFrame in a batch. */
    public List<Integer> ordinals() {
        return ordinals;
    }

    /** Null if Spark computes the rows, and does more than to rename and to choose columns. */
    public static Batches of(Dataset<Row> frame) {
        SparkSession session = frame.sparkSession().cloneSession();
        session.conf().set("spark.sql.adaptive.enabled", "false"); // it hides the plan
        session.conf().set(MAX_FIELDS, Integer.toString(Integer.MAX_VALUE)); // else rows from 100 on
        SparkPlan plan = Dataset.ofRows(session, frame.queryExecution().analyzed())
                .queryExecution().executedPlan();
        List<ExprId> columns = new ArrayList<>();
        for (int k = 0; k < plan.output().size(); k++) {
            columns.add(plan.output().apply(k).exprId());
        }
        while (!plan.supportsColumnar()) {
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
        List<Integer> ordinals = new ArrayList<>();
        for (ExprId column : columns) {
            int found = plan.output().size() - 1;
            while (found >= 0 && !plan.output().apply(found).exprId().equals(column)) {
                found--;
            }
            if (found < 0) {
                return null;
            }
            ordinals.add(found);
        }
        return new Batches(plan, ordinals);
    }

    /** The columns of which a projection makes these; null if it computes. */
    private static List<ExprId> sources(List<ExprId> columns, Seq<NamedExpression> projected) {
        List<ExprId> found = new ArrayList<>();
        for (ExprId column : columns) {
            Expression source = null;
            for (int k = 0; k < projected.size() && source == null; k++) {
                NamedExpression named = projected.apply(k);
                if (named.exprId().equals(column)) {
                    source = named instanceof Alias ? ((Alias) named).child() : (Expression) named;
                }
            }
            if (!(source instanceof Attribute)) {
                return null;
            }
            found.add(((Attribute) source).exprId());
        }
        return found;
    }
}
