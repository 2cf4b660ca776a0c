package alchemist.spark;

import java.io.Serializable;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import org.apache.spark.Partition;
import org.apache.spark.TaskContext;
import org.apache.spark.rdd.RDD;
import org.apache.spark.unsafe.Platform;
import scala.collection.JavaConverters;
import scala.reflect.ClassTag;
import scala.reflect.ClassTag$;
import scala.runtime.AbstractFunction2;

/**
 * A function of each partition of an RDD. Spark's own {@code mapPartitions} and {@code collect} read the
 * class files of their functions again for each job, which takes longer than a small job.
 */
final class PartitionTasks<T, U> extends RDD<U> {
    private static final long serialVersionUID = 1;

    interface Task<T, U> extends Serializable {
        Iterator<U> run(int partition, Iterator<T> elements) throws Exception;
    }

    private final Task<T, U> task;

    /** {@code type}: of Scala's arrays of the results. */
    PartitionTasks(RDD<T> parent, Class<? super U> type, Task<T, U> task) {
        super(parent, ClassTag$.MODULE$.<U>apply(type));
        this.task = task;
    }

    private static final class ToArray<E>
            extends AbstractFunction2<TaskContext, scala.collection.Iterator<E>, Object[]>
            implements Serializable {
        private static final long serialVersionUID = 1;

        @Override
        public Object[] apply(TaskContext context, scala.collection.Iterator<E> elements) {
            List<E> found = new ArrayList<>();
            while (elements.hasNext()) {
                found.add(elements.next());
            }
            return found.toArray();
        }
    }

    /** All elements, in the order of their partitions. */
    @SuppressWarnings("unchecked")
    List<U> all() {
        List<U> found = new ArrayList<>();
        Object parts = context().runJob(this, new ToArray<U>(), PartitionTasks.<Object[]>tag());
        for (Object part : (Object[]) parts) {
            found.addAll((List<U>) Arrays.asList((Object[]) part));
        }
        return found;
    }

    private static <E> ClassTag<E> tag() {
        return ClassTag$.MODULE$.apply(Object.class);
    }

    @Override
    public Partition[] getPartitions() {
        return firstParent(PartitionTasks.<T>tag()).partitions();
    }

    @Override
    public scala.collection.Iterator<U> compute(Partition split, TaskContext context) {
        Iterator<T> elements = JavaConverters.asJavaIteratorConverter(
                firstParent(PartitionTasks.<T>tag()).iterator(split, context)).asJava();
        try {
            return JavaConverters.asScalaIteratorConverter(task.run(split.index(), elements))
                    .asScala();
        } catch (Exception error) { // Scala declares none
            Platform.throwException(error);
            throw new IllegalStateException(error);
        }
    }
}
