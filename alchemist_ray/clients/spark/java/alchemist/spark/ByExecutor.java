package alchemist.spark;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.Partition;
import org.apache.spark.rdd.DefaultPartitionCoalescer;
import org.apache.spark.rdd.PartitionCoalescer;
import org.apache.spark.rdd.PartitionGroup;
import org.apache.spark.rdd.RDD;
import org.apache.spark.scheduler.ExecutorCacheTaskLocation;
import org.apache.spark.scheduler.TaskLocation;
import scala.Some;
import scala.collection.Seq;

/**
 * Groups cached partitions by the executor that has them in its memory.
 *
 * <p>Spark's own coalescer knows hosts only: of two executors on a host, each would fetch about half
 * of its partitions from the other.
 */
final class ByExecutor implements PartitionCoalescer, scala.Serializable {
    private static final long serialVersionUID = 1;

    @Override
    public PartitionGroup[] coalesce(int most, RDD<?> parent) {
        Partition[] all = parent.partitions();
        Map<String, List<Partition>> there = new LinkedHashMap<>();
        for (Partition partition : all) {
            Seq<TaskLocation> places =
                    parent.context().getPreferredLocs(parent, partition.index());
            if (places.isEmpty() || !(places.head() instanceof ExecutorCacheTaskLocation)) {
                return new DefaultPartitionCoalescer(0.1).coalesce(most, parent);
            }
            String place = places.head().toString();
            there.computeIfAbsent(place, any -> new ArrayList<>()).add(partition);
        }
        List<PartitionGroup> groups = new ArrayList<>();
        there.forEach((place, its) -> {
            int count = Math.max(1, Math.round((float) most * its.size() / all.length));
            for (int k = 0; k < count; k++) {
                PartitionGroup group = new PartitionGroup(new Some<>(place));
                for (Partition one : its.subList(
                        k * its.size() / count, (k + 1) * its.size() / count)) {
                    group.partitions().$plus$eq(one);
                }
                if (group.numPartitions() > 0) {
                    groups.add(group);
                }
            }
        });
        return groups.toArray(new PartitionGroup[0]);
    }
}
