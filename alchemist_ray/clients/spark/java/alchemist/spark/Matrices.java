package alchemist.spark;

import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.api.java.JavaSparkContext;
import org.apache.spark.mllib.linalg.DenseMatrix;
import org.apache.spark.mllib.linalg.DenseVector;
import org.apache.spark.mllib.linalg.Matrix;
import org.apache.spark.mllib.linalg.Vector;
import org.apache.spark.mllib.linalg.distributed.BlockMatrix;
import org.apache.spark.mllib.linalg.distributed.CoordinateMatrix;
import org.apache.spark.mllib.linalg.distributed.IndexedRow;
import org.apache.spark.mllib.linalg.distributed.IndexedRowMatrix;
import org.apache.spark.mllib.linalg.distributed.MatrixEntry;
import org.apache.spark.mllib.linalg.distributed.RowMatrix;
import org.apache.spark.rdd.RDD;
import scala.Tuple2;

/** A matrix as one of MLlib's: lazy, tasks fetch the elements. The session calls it through py4j. */
public final class Matrices {
    private Matrices() {}

    /** Makes objects of MLlib of a region's elements. */
    private interface Conversion<T> extends Serializable {
        Iterator<T> of(long[] region, byte[] block, Element element);
    }

    public static RowMatrix rows(JavaSparkContext spark, String spec, int partitions) {
        Target target = Target.parse(spec);
        JavaRDD<Vector> rows = fetched(
                spark, batches(target, partitions), partitions, spec, true,
                (region, block, element) -> {
                    List<Vector> found = new ArrayList<>();
                    for (long row = region[0]; row < region[1]; row++) {
                        found.add(row(row, region, block, element));
                    }
                    return found.iterator();
                });
        return new RowMatrix(tagged(rows, Vector.class), target.rows, target.cols);
    }

    public static IndexedRowMatrix indexedRows(
            JavaSparkContext spark, String spec, int partitions) {
        Target target = Target.parse(spec);
        JavaRDD<IndexedRow> rows = fetched(
                spark, batches(target, partitions), partitions, spec, true,
                (region, block, element) -> {
                    List<IndexedRow> found = new ArrayList<>();
                    for (long row = region[0]; row < region[1]; row++) {
                        found.add(new IndexedRow(row, row(row, region, block, element)));
                    }
                    return found.iterator();
                });
        return new IndexedRowMatrix(tagged(rows, IndexedRow.class), target.rows, target.cols);
    }

    /** The nonzero elements. */
    public static CoordinateMatrix entries(JavaSparkContext spark, String spec, int partitions) {
        Target target = Target.parse(spec);
        JavaRDD<MatrixEntry> entries = fetched(
                spark, batches(target, partitions), partitions, spec, true,
                (region, block, element) -> {
                    List<MatrixEntry> found = new ArrayList<>();
                    for (long row = region[0]; row < region[1]; row++) {
                        double[] values = row(row, region, block, element).values();
                        for (int j = 0; j < values.length; j++) {
                            if (values[j] != 0) {
                                found.add(new MatrixEntry(row, j, values[j]));
                            }
                        }
                    }
                    return found.iterator();
                });
        return new CoordinateMatrix(tagged(entries, MatrixEntry.class), target.rows, target.cols);
    }

    /** Blocks of {@code down} rows and {@code across} columns; the last ones are smaller. */
    public static BlockMatrix blocks(
            JavaSparkContext spark, String spec, int partitions, int down, int across) {
        Target target = Target.parse(spec);
        List<long[]> regions = new ArrayList<>();
        for (long row = 0; row < target.rows; row += down) {
            for (long col = 0; col < target.cols; col += across) {
                regions.add(new long[] {
                    row, Math.min(row + down, target.rows), col, Math.min(col + across, target.cols)
                });
            }
        }
        JavaRDD<Tuple2<Tuple2<Object, Object>, Matrix>> blocks = fetched(
                spark, regions, partitions, spec, false,
                (region, block, element) -> {
                    int height = (int) (region[1] - region[0]);
                    int width = (int) (region[3] - region[2]);
                    double[] values = new double[height * width];
                    element.load(block, 0, values);
                    Tuple2<Object, Object> place =
                            new Tuple2<>((int) (region[0] / down), (int) (region[2] / across));
                    Matrix matrix = new DenseMatrix(height, width, values);
                    return Collections.singleton(new Tuple2<>(place, matrix)).iterator();
                });
        return new BlockMatrix(
                tagged(blocks, Tuple2.class), down, across, target.rows, target.cols);
    }

    /** With the class that Scala's arrays of it have. */
    @SuppressWarnings("unchecked")
    private static <T> RDD<T> tagged(JavaRDD<T> found, Class<?> type) {
        return found.rdd().retag((Class<T>) type);
    }

    private static DenseVector row(long row, long[] region, byte[] block, Element element) {
        double[] values = new double[(int) region[3]];
        element.load(block, (int) (row - region[0]) * values.length * element.nbytes, values);
        return new DenseVector(values);
    }

    /** Regions of whole rows: at least one in each partition. */
    private static List<long[]> batches(Target target, int partitions) {
        long fitting = Fetcher.BATCH_BYTES / ((long) target.cols * target.element.nbytes);
        long share = (target.rows + partitions - 1) / partitions;
        long height = Math.max(1, Math.min(fitting, share));
        List<long[]> found = new ArrayList<>();
        for (long row = 0; row < target.rows; row += height) {
            found.add(new long[] {row, Math.min(row + height, target.rows), 0, target.cols});
        }
        return found;
    }

    private static <T> JavaRDD<T> fetched(
            JavaSparkContext spark, List<long[]> regions, int partitions, String spec,
            boolean byRow, Conversion<T> conversion) {
        return spark.parallelize(regions, partitions).mapPartitions(some -> {
            Fetcher fetcher = new Fetcher(Target.parse(spec));
            TaskContext.get().addTaskCompletionListener(context -> {
                try {
                    fetcher.close();
                } catch (IOException error) {
                    throw new UncheckedIOException(error);
                }
            });
            return new Iterator<T>() {
                private Iterator<T> batch = Collections.emptyIterator();

                @Override
                public boolean hasNext() {
                    while (!batch.hasNext() && some.hasNext()) {
                        long[] region = some.next();
                        try {
                            byte[] block = fetcher.fetch(region, byRow);
                            batch = conversion.of(region, block, fetcher.target.element);
                        } catch (IOException error) {
                            throw new UncheckedIOException(error);
                        }
                    }
                    return batch.hasNext();
                }

                @Override
                public T next() {
                    if (!hasNext()) {
                        throw new NoSuchElementException();
                    }
                    return batch.next();
                }
            };
        });
    }
}
